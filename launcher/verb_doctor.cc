// annulus doctor: what is installed, and what will be used of it.
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>

#include "attention/kernels/detect.h"
#include "attention/kernels/kernel.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/topology/binding.h"
#include "comm/topology/machine.h"
#include "common/error.h"
#include "common/version.h"
#include "launcher/device.h"
#include "launcher/mpirun.h"
#include "launcher/verb.h"

namespace annulus {
namespace {

void row(const char* what, const std::string& found) { std::printf("  %-16s %s\n", what, found.c_str()); }

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

class DoctorVerb : public Verb {
 public:
  void declare(CLI::App& app) override { app.footer("Example:\n  ./annulus doctor"); }

  int run() override {
    bool good = true;
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
      row("cores", current_binding().cpus.to_string() + " open to this process");
    } catch (const Error& error) {
      row("cores", error.what());
    }
    return good ? 0 : static_cast<int>(ErrorKind::kUnavailable);
  }
};

}  // namespace

std::unique_ptr<Verb> make_doctor_verb() { return std::make_unique<DoctorVerb>(); }

}  // namespace annulus
