// annulus doctor: what is installed, and what will be used of it.
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/detect.h"
#include "comm/nccl/nccl_communicator.h"
#include "common/error.h"
#include "common/text.h"
#include "common/version.h"
#include "launcher/device.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/verb.h"
#include "memory/caches.h"
#include "topology/binding.h"
#include "topology/machine.h"

namespace annulus {
namespace {

// A line of the table, and a member of the JSON.
struct Row {
  const char* key;
  const char* what;
  std::string text;
};

void print(const std::vector<Row>& rows) {
  for (const Row& row : rows) std::printf("  %-16s %s\n", row.what, row.text.c_str());
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string text_of(const CacheReport& cache) {
  const CacheStats& s = cache.stats;
  const auto mib = [](int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f", static_cast<double>(bytes) / (1 << 20));
    return std::string(text);
  };
  return mib(s.bytes) + " of " + mib(s.capacity) + " MiB in " + std::to_string(s.entries) + " entries, " +
         std::to_string(s.hits) + " hits, " + std::to_string(s.misses) + " misses, " + std::to_string(s.evictions) +
         " evicted, " + std::to_string(s.too_large) + " too large: " + std::string(cache.holds);
}

// What is installed, and what will be used of it.
struct Findings {
  std::vector<Row> found, used;
  std::vector<DetectedKernel> kernels;
  int64_t cache_bytes = 0;
  std::vector<CacheReport> caches;
  bool good = true;
};

Findings look() {
  Findings f;
  f.cache_bytes = cache_total();  // refuses what it cannot read before anything is said
  f.found.push_back({"libtorch", "LibTorch", TORCH_VERSION});
  try {
    const Mpirun mpirun = find_mpirun();
    f.found.push_back({"mpi", "MPI", "Open MPI " + mpirun.version + ", " + mpirun.path});
  } catch (const Error& error) {
    f.found.push_back({"mpi", "MPI", std::string("no: ") + error.what()});
    f.good = false;
  }
  const Machine machine = Machine::this_machine();
  f.found.push_back({"machine", "machine",
                     counted(static_cast<int64_t>(machine.cores.size()), "core") +
                         ", NUMA nodes: " + std::to_string(machine.numa_nodes.size()) + ", " +
                         std::to_string(machine.memory_bytes() >> 30) + " GiB"});
  f.found.push_back(
      {"gpus", "GPUs",
       machine.gpus.empty() ? "none" : std::to_string(machine.gpus.size()) + " x " + machine.gpus[0].model});
  const std::string driver = first_line("/proc/driver/nvidia/version");
  f.found.push_back({"driver", "driver", driver.empty() ? "no NVIDIA driver" : driver});
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
  f.caches = cache_reports();
  return f;
}

void print_table(const Findings& f) {
  std::printf("annulus %s\n\nfound\n", kVersion);
  print(f.found);
  std::printf("\nattention kernels\n");
  for (const DetectedKernel& kernel : f.kernels) {
    print({{"", kernel.name.c_str(), (kernel.found ? "yes: " : "no: ") + kernel.note + " (" + kernel.inputs + ")"}});
  }
  std::printf("\nused\n");
  print(f.used);
  std::printf("\ncaches: %lld MiB together (memory.caches of a run; elsewhere ANNULUS_CACHES_MIB)\n",
              static_cast<long long>(f.cache_bytes >> 20));
  for (const CacheReport& cache : f.caches) print({{"", std::string(cache.name).c_str(), text_of(cache)}});
}

void print_json(const Findings& f) {
  using Json = nlohmann::ordered_json;
  const auto members = [](const std::vector<Row>& rows) {
    Json all;
    for (const Row& row : rows) all[row.key] = row.text;
    return all;
  };
  Json kernels = Json::array(), caches;
  for (const DetectedKernel& k : f.kernels) {
    kernels.push_back({{"name", k.name}, {"found", k.found}, {"note", k.note}, {"inputs", k.inputs}});
  }
  for (const CacheReport& cache : f.caches) {
    const CacheStats& s = cache.stats;
    caches[std::string(cache.name)] = {{"bytes", s.bytes}, {"capacity", s.capacity}, {"entries", s.entries}};
  }
  const Json all = {{"version", kVersion}, {"good", f.good},          {"found", members(f.found)},
                    {"kernels", kernels},  {"used", members(f.used)}, {"cache_bytes", f.cache_bytes},
                    {"caches", caches}};
  std::printf("%s\n", all.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

class DoctorVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.footer("Example:\n  ./annulus doctor");
  }

  int run() override {
    const Findings findings = look();
    json_ ? print_json(findings) : print_table(findings);
    return findings.good ? 0 : static_cast<int>(ErrorKind::kUnavailable);
  }

 private:
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_doctor_verb() { return std::make_unique<DoctorVerb>(); }

}  // namespace annulus
