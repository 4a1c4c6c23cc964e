// annulus doctor: what is installed, and what will be used of it.
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>

#include "comm/topology/binding.h"
#include "comm/topology/machine.h"
#include "common/error.h"
#include "common/version.h"
#include "launcher/mpirun.h"
#include "launcher/verb.h"

namespace annulus {
namespace {

void row(const char* what, const std::string& found) { std::printf("  %-10s %s\n", what, found.c_str()); }

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
    row("machine", std::to_string(machine.cores.size()) + " cores, " + std::to_string(machine.numa_nodes.size()) +
                       " NUMA nodes, " + std::to_string(machine.memory_bytes() >> 30) + " GiB");
    row("GPUs", machine.gpus.empty() ? "none" : std::to_string(machine.gpus.size()) + " x " + machine.gpus[0].model);
    const std::string driver = first_line("/proc/driver/nvidia/version");
    row("driver", driver.empty() ? "no NVIDIA driver" : driver);
#ifdef ANNULUS_CUDA
    const bool cuda_build = true;
#else
    const bool cuda_build = false;
#endif
    row("build", cuda_build ? "with CUDA and NCCL" : "for CPUs");

    const bool gpus = !machine.gpus.empty() && !driver.empty();
    std::printf("\nused\n");
    if (cuda_build && gpus) {
      row("device", "cuda for up to " + std::to_string(machine.gpus.size()) + " ranks on this host, otherwise cpu");
      row("backend", "nccl between GPUs, mpi between CPUs");
    } else {
      row("device", std::string("cpu: ") + (machine.gpus.empty() ? "this host has no GPU"
                                            : driver.empty()     ? "there is a GPU, but no NVIDIA driver"
                                                                 : "this build has no CUDA; build with --config=cuda"));
      row("backend", std::string("mpi; nccl not: ") + (cuda_build ? "no GPU to use" : "not in this build"));
    }
    row("kernel", "aten (LibTorch's flash attention) for fp32, fp64 and bf16; reference (dense fp64) where asked for");
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
