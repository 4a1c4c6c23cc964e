// annulus doctor: shows what is wrong with this host, or with the hosts of a job, what is installed, and which of it
// annulus will use. The checks are in launcher/doctor/host_checks.h.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/detect.h"
#include "comm/nccl/nccl_communicator.h"
#include "common/error.h"
#include "common/text.h"
#include "common/version.h"
#include "launcher/device.h"
#include "launcher/doctor/host_checks.h"
#include "launcher/hosts/host_discovery.h"
#include "launcher/hosts/host_facts.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/network/network.h"
#include "launcher/subcommand.h"
#include "launcher/threads.h"
#include "launcher/topology/binding.h"
#include "launcher/topology/machine.h"
#include "memory/caches.h"
#include "memory/pool/pool.h"

namespace annulus {
namespace {

// A line of the table and a member of the JSON object.
struct Fact {
  const char* key;
  const char* what;
  std::string text;
};

void print(const std::vector<Fact>& rows) {
  for (const Fact& row : rows) std::printf("  %-16s %s\n", row.what, row.text.c_str());
}

// Its share and what it is for. What it holds is not said, because this process has computed nothing.
std::string text_of(const CacheReport& cache) {
  return "at most " + rounded(static_cast<double>(cache.stats.capacity) / (1 << 20), 1) +
         " MiB: " + std::string(cache.holds);
}

// What is installed on this host, and which of it annulus will use.
struct Inventory {
  std::vector<Fact> found, used;
  std::vector<DetectedKernel> kernels;
  int64_t cache_bytes = 0;
  std::vector<CacheReport> caches;
  int64_t pool_bound = 0;
  std::vector<PoolReport> pool;
};

Inventory look(const HostReport& report) {
  Inventory f;
  f.cache_bytes = cache_total();
  f.found.push_back({"libtorch", "LibTorch", report.libtorch});
  f.found.push_back({"mpi", "MPI",
                     report.mpirun_version.empty() ? "no: " + report.mpirun
                                                   : "Open MPI " + report.mpirun_version + ", " + report.mpirun});
  const Machine& machine = report.host.machine;
  f.found.push_back({"machine", "machine",
                     counted(machine.cores.size(), "core") +
                         ", NUMA nodes: " + std::to_string(machine.numa_nodes.size()) + ", " +
                         std::to_string(machine.memory_bytes() >> 30) + " GiB"});
  f.found.push_back(
      {"gpus", "GPUs",
       machine.gpus.empty() ? "none" : std::to_string(machine.gpus.size()) + " x " + machine.gpus[0].model});
  f.found.push_back({"driver", "driver", report.driver.empty() ? "no NVIDIA driver" : report.driver});
  const std::string nccl = nccl_unavailable();
  f.found.push_back({"nccl", "NCCL", nccl.empty() ? nccl_version() : nccl});
  f.kernels = detected_kernels();

  const std::string shortfall = cuda_shortfall(1);
  f.used.push_back({"device", "device",
                    shortfall.empty()
                        ? "cuda, " + counted(cuda_devices(), "GPU") + ": for as many ranks of a host, otherwise cpu"
                        : "cpu: " + shortfall});
  f.used.push_back(
      {"backend", "backend", shortfall.empty() ? "nccl between GPUs, mpi between CPUs and for agreement" : "mpi"});
  if (shortfall.empty()) {
    const auto reason = [](at::ScalarType type) {
      return choose_kernel(KernelKind::kAuto, at::kCUDA, type, 128, false).reason;
    };
    f.used.push_back({"kernel_cuda_bf16", "kernel, cuda", reason(at::kBFloat16)});
    f.used.push_back({"kernel_cuda_fp32", "kernel, cuda", reason(at::kFloat)});
  }
  f.used.push_back({"kernel_cpu", "kernel",
                    choose_kernel(KernelKind::kAuto, at::kCPU, at::kFloat, 64, false).reason +
                        "; reference (dense fp64, slow) where asked for"});
  try {
    f.used.push_back({"cores", "cores", current_cpus().to_string() + " open to this process"});
  } catch (const Error& error) {
    f.used.push_back({"cores", "cores", error.what()});
  }
  f.used.push_back({"threads", "threads", threads_text()});
  f.caches = cache_reports();
  f.pool_bound = Pool::process().bound();
  f.pool = Pool::process().reports();
  return f;
}

void print_table(const Inventory& f) {
  std::printf("\nfound\n");
  print(f.found);
  std::printf("\nattention kernels\n");
  for (const DetectedKernel& kernel : f.kernels) {
    print({{"", kernel.name.c_str(), (kernel.found ? "yes: " : "no: ") + kernel.note + " (" + kernel.inputs + ")"}});
  }
  std::printf("\nused\n");
  print(f.used);
  std::printf(
      "\npool: freed memory kept for reuse, at most %s MiB (memory.pool of a run; elsewhere ANNULUS_POOL_MIB)\n",
      with_commas(f.pool_bound >> 20).c_str());
  for (const PoolReport& purpose : f.pool) {
    print({{"", std::string(purpose.name).c_str(), std::string(purpose.holds)}});
  }
  std::printf("\ncaches: %s MiB together (memory.caches of a run; elsewhere ANNULUS_CACHES_MIB)\n",
              with_commas(f.cache_bytes >> 20).c_str());
  if (f.cache_bytes == 0) return;
  for (const CacheReport& cache : f.caches) print({{"", std::string(cache.name).c_str(), text_of(cache)}});
}

using Json = nlohmann::ordered_json;

Json json_of(const Inventory& f) {
  const auto members = [](const std::vector<Fact>& rows) {
    Json all;
    for (const Fact& row : rows) all[row.key] = row.text;
    return all;
  };
  Json kernels = Json::array(), caches, pool;
  for (const DetectedKernel& k : f.kernels) {
    kernels.push_back({{"name", k.name}, {"found", k.found}, {"note", k.note}, {"inputs", k.inputs}});
  }
  for (const CacheReport& cache : f.caches) {
    const CacheStats& s = cache.stats;
    caches[std::string(cache.name)] = {{"bytes", s.bytes}, {"capacity", s.capacity}, {"entries", s.entries}};
  }
  for (const PoolReport& purpose : f.pool) {
    const PoolStats& s = purpose.stats;
    pool[std::string(purpose.name)] = {
        {"in_use", s.in_use}, {"cached", s.cached}, {"peak", s.peak}, {"fragmentation", s.fragmentation()}};
  }
  return {{"found", members(f.found)},
          {"kernels", kernels},
          {"used", members(f.used)},
          {"pool_bytes", f.pool_bound},
          {"pool", pool},
          {"cache_bytes", f.cache_bytes},
          {"caches", caches}};
}

// "2 errors, 1 warning, 14 good".
std::string counts_text(const std::vector<Finding>& findings) {
  std::vector<std::string> parts;
  for (const Severity severity : {Severity::kError, Severity::kWarning, Severity::kUnknown, Severity::kGood}) {
    const auto count =
        std::count_if(findings.begin(), findings.end(), [&](const Finding& f) { return f.severity == severity; });
    const bool adjective = severity == Severity::kGood || severity == Severity::kUnknown;
    const std::string word(to_string(severity));
    if (count > 0) parts.push_back(adjective ? std::to_string(count) + " " + word : counted(count, word));
  }
  return join(parts, ", ");
}

// The reports of the hosts and the results of the checks.
struct Diagnosis {
  std::vector<HostReport> reports;
  std::vector<Finding> findings;
};

class DoctorSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--hosts", hosts_, "check these hosts, a:8,b:8; mpirun starts a process on each")->type_name("LIST");
    app.add_option("--hostfile", hostfile_, "check the hosts in a file that names one per line: NAME slots=8")
        ->type_name("FILE");
    app.add_option("-n,--np", ranks_,
                   "check for a job of N ranks (default: one per GPU, or without GPUs one per NUMA node)")
        ->type_name("N")
        ->check(CLI::Range(1, 65536));
    app.add_option("--device", device_, "what the ranks compute on: auto (default), cpu or cuda")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    app.add_option("--interfaces", interfaces_, "the job's IP interfaces, eth0,eth1 (default: ANNULUS_INTERFACES)")
        ->type_name("LIST");
    app.add_flag("--all", all_, "also show the checks that find nothing wrong");
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.footer(
        "Inside a Slurm allocation of several hosts, it checks those hosts.\n"
        "Examples:\n"
        "  ./annulus doctor\n"
        "  ./annulus doctor -n 8 --device cpu --all");
  }

  void check() override {
    // The command line has precedence over the environment, as for `launch`.
    network_ = parse_network(interfaces_, "", "auto", "doctor --interfaces");
    if (network_.interfaces.empty()) network_ = network_from_environment({});
    list_ = hosts_of_options(hosts_, hostfile_);
    const bool typed = hosts_ || hostfile_;
    if (list_ && !typed && list_->hosts.size() < 2 && is_this_host(list_->hosts.front().name)) list_.reset();
    const bool counted = list_ && std::all_of(list_->hosts.begin(), list_->hosts.end(),
                                              [](const HostSlots& host) { return host.slots > 0; });
    if (counted || (list_ && ranks_ > 0)) shares_ = ranks_of_hosts(*list_, ranks_);
    if (!list_ && ranks_ > 0) shares_ = {ranks_};
  }

  int run() override {
    cache_total();  // throws on a malformed ANNULUS_CACHES_MIB before anything is printed
    Pool::process();
    // This comes before the inventory, because a report forks, and the inventory starts CUDA.
    const Diagnosis diagnosis = list_ ? diagnose_hosts() : diagnose_this_host();
    const std::vector<Finding>& findings = diagnosis.findings;
    const bool good =
        std::none_of(findings.begin(), findings.end(), [](const Finding& f) { return f.severity == Severity::kError; });
    std::optional<Inventory> inventory;
    if (!list_) inventory = look(diagnosis.reports.front());
    json_ ? print_json(diagnosis, inventory, good) : print_tables(diagnosis, inventory);
    return good ? 0 : static_cast<int>(ErrorKind::kUnavailable);
  }

 private:
  CheckRequest request() const { return {shares_, network_.interfaces, device_}; }

  Diagnosis diagnose_this_host() const {
    Diagnosis d;
    d.reports.push_back(report_of_this_host({}));
    d.findings = check_host(d.reports.front(), request(), 0);
    return d;
  }

  // If the discovery of the hosts fails, that is the first finding, followed by those about this host.
  Diagnosis diagnose_hosts() const {
    Diagnosis d;
    try {
      LauncherSocket socket(listen_tcp(network_.interfaces), list_->hosts.size());
      DiscoveryOptions options;
      options.hosts = *list_;
      options.interfaces = network_.interfaces;
      d.reports = discover_hosts(options, socket);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kUsage) throw;
      HostReport here = report_of_this_host({});
      d.findings = check_host(here, {{}, network_.interfaces, device_}, 0);
      d.findings.insert(d.findings.begin(), {"hosts", Severity::kError, "", std::string(error.message()),
                                             "try `ssh HOST true` and `" + here.program +
                                                 " version` there; docs/how-to/clusters.md, \"Before the first job\""});
      d.reports.push_back(std::move(here));
      return d;
    }
    CheckRequest asked = request();
    if (asked.ranks.empty()) {
      for (const HostReport& report : d.reports) asked.ranks.push_back(default_ranks(report));
    }
    for (size_t i = 0; i < d.reports.size(); ++i) {
      const std::vector<Finding> own = check_host(d.reports[i], asked, i);
      d.findings.insert(d.findings.end(), own.begin(), own.end());
    }
    const std::vector<Finding> together = check_together(d.reports, asked);
    d.findings.insert(d.findings.end(), together.begin(), together.end());
    return d;
  }

  void print_tables(const Diagnosis& d, const std::optional<Inventory>& inventory) const {
    std::printf("annulus %s\n\nchecks: %s%s\n%s", kVersion, counts_text(d.findings).c_str(),
                all_ ? "" : " (--all shows every one)", findings_table(d.findings, all_).c_str());
    if (const std::string table = difference_table(d.reports); !table.empty()) {
      std::printf("\nwhat differs\n%s", table.c_str());
    }
    if (inventory) print_table(*inventory);
  }

  void print_json(const Diagnosis& d, const std::optional<Inventory>& inventory, bool good) const {
    Json all = {{"version", kVersion}, {"good", good}, {"findings", findings_json(d.findings)}};
    if (inventory) all.update(json_of(*inventory));
    all["hosts"] = Json::array();
    for (const HostReport& report : d.reports) all["hosts"].push_back(Json(report_to_json(report)));
    std::printf("%s\n", all.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
  }

  std::optional<std::string> hosts_, hostfile_;
  std::string device_ = "auto", interfaces_;
  int ranks_ = 0;
  bool all_ = false, json_ = false;
  Network network_;
  std::optional<HostList> list_;  // the hosts to check; empty: this host
  std::vector<int> shares_;       // the number of ranks on each host; empty if it is not known
};

}  // namespace

std::unique_ptr<Subcommand> make_doctor_subcommand() { return std::make_unique<DoctorSubcommand>(); }

}  // namespace annulus
