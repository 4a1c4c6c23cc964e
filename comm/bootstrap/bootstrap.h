// Makes processes the ranks of a job: they find each other through MPI, agree on what they are about to do and pass the
// initialization barrier within a deadline, or they end together with one readable message. Programs call it at their
// start: the program annulus (launcher/subcommands/start_job.h), annulus_bench, the operators for PyTorch under mpirun,
// and the programs of users (examples/cpp).
//
//   int main() try {
//     Job job = bootstrap({.fingerprint = {{"version", kVersion}, {"config", text}}, .device = "cpu"});
//     ... job.world ...
//   } catch (const ReportedError& e) { return e.exit_code(); }        // one rank has printed it for all
//     catch (const Error& e) { std::cerr << e.what(); return e.exit_code(); }
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/agreement.h"
#include "comm/bootstrap/launch_info.h"
#include "comm/communicator.h"
#include "comm/mpi/mpi_runtime.h"
#include "common/error.h"

namespace annulus {

namespace comm_internal {
class Presence;
}

// An error that all ranks share and that one of them has already printed. Catch it to end with its exit code without
// printing anything.
class ReportedError final : public Error {
 public:
  explicit ReportedError(const Error& error) : Error(error) {}
};

struct BootstrapOptions {
  // What must be the same on all ranks: version, configuration, ... A value of several lines ("key = value") is
  // compared line by line, and only the lines that differ are shown.
  std::vector<Field> fingerprint = {};
  // The type of device that this rank computes on: "cpu", "cuda". It must be the same on all ranks.
  std::string device = "cpu";
  // The deadline of this rank's call. Default: ANNULUS_BOOTSTRAP_TIMEOUT, or 60 s if that is not set.
  std::optional<Seconds> timeout = std::nullopt;
  // Numbers the ranks host by host, even if the launcher numbered them otherwise (for example cyclically). Job::rank
  // and the ranks of Job::world are then in the order of rank_order_by_host, so that consecutive ranks share a host
  // where possible. Job::launch keeps the launcher's number, which log files have in their names.
  bool host_by_host = false;
  // The command with which users start the ranks of this program, up to the number of ranks. Messages contain it.
  std::string start = "mpirun -n";
  // Reports the error of the rank that reports for all. Default: the log (common/logging/log.h). It must be thread
  // safe, because a watching thread may call it.
  std::function<void(const Error&)> report = nullptr;
};

// The order of the members matters: the communicator is destroyed before the runtime.
struct Job {
  LaunchInfo launch;
  std::shared_ptr<MpiRuntime> runtime;  // null if the job is one rank that runs without MPI
  std::shared_ptr<comm_internal::Presence> presence;
  std::shared_ptr<Communicator> world;  // of all ranks, for CPU tensors
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host, in rank order
  int local_size = 1;
  std::string host;
  std::function<void(const Error&)> report;

  // Collective. Like annulus::require_agreement, but rank 0 prints a disagreement, and all ranks raise ReportedError.
  void require_agreement(const std::vector<Field>& fields, OpLabel label);

  // Collective. Like together() (comm/agreement.h), but rank 0 prints the error, and all ranks raise ReportedError. It
  // is for steps that may fail on some ranks only, such as opening a file or choosing a device. If `step` communicates,
  // it must fail on all ranks or on none.
  void run_together(OpLabel label, const std::function<void()>& step);
};

// Returns the ranks host by host: hosts in the order of their lowest ranks, and the ranks of a host in ascending order.
// hosts[r] is the host of rank r: {"a", "b", "a"} gives 0, 2, 1. Rank 0 stays the first.
std::vector<int> rank_order_by_host(const std::vector<std::string>& hosts);

// Collective over the processes that the launcher started. Within the deadline either every rank has its Job, or every
// rank ends with one message:
// - If ranks disagree, all raise ReportedError(kMismatch), which names the ranks and fields.
// - If MPI forms a world of another size than was started, for example because mpirun belongs to another MPI,
//   ReportedError(kComm) is raised; Error(kComm) if ANNULUS_WORLD_SIZE asks for ranks and there is no launcher.
// - If a launcher that gives annulus no ranks (torchrun) started more processes, Error(kUnavailable) is raised
//   (ReportedError if MPI has started by then). With ANNULUS_WORLD_SIZE=1 each of them computes for itself.
// - If a rank never comes, is stopped or dies, the message names it if it is on the same host, and the process ends
//   with _exit(6), because a call of MPI cannot be cancelled.
Job bootstrap(const BootstrapOptions& options);

}  // namespace annulus
