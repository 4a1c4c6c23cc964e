// See host_report.h.
#include "launcher/hosts/host_report.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "common/error.h"
#include "common/version.h"
#include "topology/cluster.h"

namespace annulus {
namespace {

using nlohmann::json;

// Every member by its name, once for writing and reading. `R` is a report or a const one.
template <typename R, typename Visit>
void visit_members(R& r, const Visit& visit) {
  visit("name", r.name);
  visit("listed", r.listed);
  visit("boot_id", r.boot_id);
  visit("user", r.user);
  visit("root", r.root);
  visit("program", r.program);
  visit("program_digest", r.program_digest);
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

struct Reader {
  const json& in;
  const std::string& source;

  [[noreturn]] void fail(const std::string& name, const char* expected, const json& got) const {
    throw Error(ErrorKind::kInput, "launcher",
                source + ": member \"" + name + "\" should be " + expected + ", but is " + got.type_name());
  }

  // Each reads a value that is there.
  void read(const std::string& name, const json& got, std::string& value) const {
    if (!got.is_string()) fail(name, "a text", got);
    value = got.get<std::string>();
  }
  void read(const std::string& name, const json& got, bool& value) const {
    if (!got.is_boolean()) fail(name, "true or false", got);
    value = got.get<bool>();
  }
  void read(const std::string& name, const json& got, double& value) const {
    if (!got.is_number()) fail(name, "a number", got);
    value = got.get<double>();
  }
  void read(const std::string& name, const json& got, int64_t& value) const {
    const bool fits = got.is_number_unsigned() ? got.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}
                                               : got.is_number_integer();
    if (!fits) fail(name, "a whole number of 64 bits", got);
    value = got.get<int64_t>();
  }
  void read(const std::string& name, const json& got, int& value) const {
    int64_t wide = 0;
    read(name, got, wide);
    if (wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max()) {
      fail(name, "a whole number of 32 bits", got);
    }
    value = static_cast<int>(wide);
  }
  template <typename T>
  void read(const std::string& name, const json& got, std::vector<T>& value) const {
    if (!got.is_array()) fail(name, "a list", got);
    value.clear();
    for (const json& item : got) {
      T one{};
      read(name + "[" + std::to_string(value.size()) + "]", item, one);
      value.push_back(std::move(one));
    }
  }
  void read(const std::string& name, const json& got, std::map<std::string, std::string>& value) const {
    if (!got.is_object()) fail(name, "an object", got);
    value.clear();
    for (const auto& [key, item] : got.items()) read(name + "." + key, item, value[key]);
  }
  void read(const std::string& name, const json& got, Limits& value) const {
    if (!got.is_object()) fail(name, "an object", got);
    visit_limits(value, Reader{got, source});
  }
  void read(const std::string& name, const json& got, Space& value) const {
    if (!got.is_object()) fail(name, "an object", got);
    visit_space(value, Reader{got, source});
  }
  void read(const std::string& name, const json& got, Host& value) const {
    value = host_from_json(got, source + ", member \"" + name + "\"");
  }

  template <typename T>
  void operator()(const char* name, T& value) const {
    if (const auto found = in.find(name); found != in.end()) read(name, *found, value);
  }
};

}  // namespace

json report_to_json(const HostReport& report) {
  json out;
  visit_members(report, Writer{out});
  return out;
}

HostReport report_from_json(const json& json, const std::string& source) {
  if (!json.is_object()) {
    throw Error(ErrorKind::kInput, "launcher", source + ": a report of a host is expected, a JSON object");
  }
  for (const char* name : {"name", "version"}) {
    if (!json.contains(name) || !json[name].is_string()) {
      throw Error(ErrorKind::kInput, "launcher", source + ": member \"" + name + "\" is missing or no text");
    }
  }
  HostReport report;
  const Reader reader{json, source};
  const bool same_version = json["version"].get<std::string>() == kVersion;
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
