// See host_report.h.
#include "launcher/hosts/host_report.h"

#include <climits>
#include <nlohmann/json.hpp>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/version.h"
#include "launcher/topology/cluster.h"

namespace annulus {
namespace {

using nlohmann::json;

// Calls `visit` with the name and value of every member, for writing and for reading. `R` is HostReport, const or not.
template <typename R, typename Visit>
void visit_members(R& r, const Visit& visit) {
  visit("name", r.name);
  visit("listed", r.listed);
  visit("boot_id", r.boot_id);
  visit("user", r.user);
  visit("root", r.root);
  visit("program", r.program);
  visit("program_digest", r.program_digest);
  visit("folder_digest", r.folder_digest);
  visit("version", r.version);
  visit("architecture", r.architecture);
  visit("isa", r.isa);
  visit("kernel", r.kernel);
  visit("libtorch", r.libtorch);
  visit("libtorch_path", r.libtorch_path);
  visit("mpi_library", r.mpi_library);
  visit("mpirun", r.mpirun);
  visit("mpirun_version", r.mpirun_version);
  visit("clock_seconds", r.clock_seconds);
  visit("clock_offset", r.clock_offset);
  visit("clock_accuracy", r.clock_accuracy);
  visit("limits", r.limits);
  visit("shm", r.shm);
  visit("tmp", r.tmp);
  visit("work", r.work);
  visit("ptrace_scope", r.ptrace_scope);
  visit("cma", r.cma);
  visit("host", r.host);
  visit("hwloc_gpus", r.hwloc_gpus);
  visit("driver_gpus", r.driver_gpus);
  visit("driver", r.driver);
  visit("driver_cuda", r.driver_cuda);
  visit("build_cuda", r.build_cuda);
  visit("torch_cuda", r.torch_cuda);
  visit("nccl", r.nccl);
  visit("nccl_loaded", r.nccl_loaded);
  visit("nccl_path", r.nccl_path);
  visit("nccl_of_torch", r.nccl_of_torch);
  visit("peer_access", r.peer_access);
  visit("environment", r.environment);
  visit("files", r.files);
  visit("unreachable", r.unreachable);
}

template <typename L, typename Visit>
void visit_limits(L& limits, const Visit& visit) {
  visit("locked_bytes", limits.locked_bytes);
  visit("open_files", limits.open_files);
  visit("processes", limits.processes);
}

template <typename S, typename Visit>
void visit_space(S& space, const Visit& visit) {
  visit("path", space.path);
  visit("free_bytes", space.free_bytes);
  visit("total_bytes", space.total_bytes);
  visit("writable", space.writable);
}

struct Writer {
  json& out;

  template <typename T>
  void operator()(const char* name, const T& value) const {
    out[name] = value;
  }
  void operator()(const char* name, const Host& host) const { out[name] = host_to_json(host); }
  void operator()(const char* name, const Limits& limits) const { visit_limits(limits, Writer{out[name]}); }
  void operator()(const char* name, const Space& space) const { visit_space(space, Writer{out[name]}); }
};

// Limits for reports that are read, higher than any real host needs.
constexpr size_t kMostText = size_t{1} << 20, kMostItems = 65536;

struct Reader {
  const json& whole;
  CheckedJson in;
  const std::string& source;

  static void read(const CheckedJson& got, std::string& value) { value = got.text(kMostText); }
  static void read(const CheckedJson& got, bool& value) { value = got.boolean(); }
  static void read(const CheckedJson& got, double& value) { value = got.number(-1e300, 1e300); }
  static void read(const CheckedJson& got, int64_t& value) { value = got.integer(INT64_MIN, INT64_MAX); }
  static void read(const CheckedJson& got, int& value) { value = static_cast<int>(got.integer(INT_MIN, INT_MAX)); }
  static void read(const CheckedJson& got, std::map<std::string, std::string>& value) {
    value.clear();
    for (const std::string& key : got.keys(kMostItems)) read(got.at(key), value[key]);
  }
  template <typename T>
  static void read(const CheckedJson& got, std::vector<T>& value) {
    value.clear();
    for (const CheckedJson& item : got.list(kMostItems)) {
      T one{};
      read(item, one);
      value.push_back(std::move(one));
    }
  }

  template <typename T>
  void operator()(const char* name, T& value) const {
    if (in.has(name)) read(in.at(name), value);
  }
  void operator()(const char* name, Limits& limits) const {
    if (in.has(name)) visit_limits(limits, Reader{whole, in.at(name), source});
  }
  void operator()(const char* name, Space& space) const {
    if (in.has(name)) visit_space(space, Reader{whole, in.at(name), source});
  }
  void operator()(const char* name, Host& host) const {
    if (in.has(name)) host = host_from_json(whole[name], source + ", member \"" + name + "\"");
  }
};

}  // namespace

json report_to_json(const HostReport& report) {
  json out;
  visit_members(report, Writer{out});
  return out;
}

HostReport report_from_json(const json& json, const std::string& source) {
  const CheckedJson checked(json, "launcher", source);
  const bool same_version = checked.at("version").text() == kVersion;
  checked.at("name").text();
  HostReport report;
  const Reader reader{json, checked, source};
  visit_members(report, [&](const char* name, auto& value) {
    try {
      reader(name, value);
    } catch (const Error&) {
      if (same_version) throw;
      value = {};
    }
  });
  return report;
}

}  // namespace annulus
