// annulus doctor: what is installed, and what will be used of it.
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>

#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/detect.h"
#include "comm/nccl/nccl_communicator.h"
#include "common/error.h"
#include "common/version.h"
#include "launcher/device.h"
#include "launcher/launch/mpirun.h"
#include "launcher/verb.h"
#include "memory/caches.h"
#include "topology/binding.h"
#include "topology/machine.h"

namespace annulus {
namespace {

void row(const char* what, const std::string& found) { std::printf("  %-16s %s\n", what, found.c_str()); }

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

class DoctorVerb : public Verb {
 public:
  void declare(CLI::App& app) override { app.footer("Example:\n  ./annulus doctor"); }

  int run() override {
    bool good = true;
    const int64_t caches = cache_total();  // refuses what it cannot read before anything is said
    std::printf("annulus %s\n\nfound\n", kVersion);
    row("LibTorch", TORCH_VERSION);
    try {
      const Mpirun mpirun = find_mpirun();
      row("MPI", "Open MPI " + mpirun.version + ", " + mpirun.path);
    } catch (const Error& error) {
      row("MPI", std::string("no: ") + error.what());
      good = false;
    }
    const Machine machine = Machine::this_machine();
    row("machine", std::to_string(machine.cores.size()) +
                       " cores, NUMA nodes: " + std::to_string(machine.numa_nodes.size()) + ", " +
                       std::to_string(machine.memory_bytes() >> 30) + " GiB");
    row("GPUs", machine.gpus.empty() ? "none" : std::to_string(machine.gpus.size()) + " x " + machine.gpus[0].model);
    const std::string driver = first_line("/proc/driver/nvidia/version");
    row("driver", driver.empty() ? "no NVIDIA driver" : driver);
    const std::string nccl = nccl_unavailable();
    row("NCCL", nccl.empty() ? nccl_version() : nccl);

    std::printf("\nattention kernels\n");
    for (const DetectedKernel& kernel : detected_kernels()) {
      row(kernel.name.c_str(), (kernel.found ? "yes: " : "no: ") + kernel.note + " (" + kernel.inputs + ")");
    }
    std::printf("\nused\n");
    const std::string shortfall = cuda_shortfall(1);
    const int gpus = cuda_devices();
    row("device", shortfall.empty() ? "cuda, " + std::to_string(gpus) + (gpus == 1 ? " GPU" : " GPUs") +
                                          ": for as many ranks of a host, otherwise cpu"
                                    : "cpu: " + shortfall);
    row("backend", shortfall.empty() ? "nccl between GPUs, mpi between CPUs and for agreement" : "mpi");
    if (shortfall.empty()) {
      for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
        row("kernel, cuda", choose_kernel(KernelKind::kAuto, at::kCUDA, type, 128, false).reason);
      }
    }
    row("kernel", choose_kernel(KernelKind::kAuto, at::kCPU, at::kFloat, 64, false).reason +
                      "; reference (dense fp64, slow) where asked for");
    try {
      row("cores", current_cpus().to_string() + " open to this process");
    } catch (const Error& error) {
      row("cores", error.what());
    }
    std::printf("\ncaches: %lld MiB together (memory.caches of a run; elsewhere ANNULUS_CACHES_MIB)\n",
                static_cast<long long>(caches >> 20));
    for (const CacheReport& cache : cache_reports()) row(std::string(cache.name).c_str(), text_of(cache));
    return good ? 0 : static_cast<int>(ErrorKind::kUnavailable);
  }
};

}  // namespace

std::unique_ptr<Verb> make_doctor_verb() { return std::make_unique<DoctorVerb>(); }

}  // namespace annulus
