// How processes become a job: they find each other through MPI, agree on what they are about to do and pass the
// initialization barrier within a deadline, or end together with one readable message. The first thing a rank does.
//
//   int main() try {
//     Job job = bootstrap({.fingerprint = {{"version", kVersion}, {"config", text}}, .device = "cpu"});
//     ... job.world ...
//   } catch (const ReportedError& e) { return e.exit_code(); }        // one rank has said it for all
//     catch (const Error& e) { std::cerr << e.what(); return e.exit_code(); }
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/launch_info.h"
#include "comm/mpi/mpi_runtime.h"
#include "common/error.h"

namespace annulus {

namespace comm_internal {
class Presence;
}

// An error that all ranks share and that one of them has already printed: end with its exit code, print nothing.
class ReportedError final : public Error {
 public:
  explicit ReportedError(const Error& error) : Error(error) {}
};

struct BootstrapOptions {
  // What must be the same on all ranks: version, configuration, ... A value of several lines ("key = value") is
  // compared line by line, and only the lines that differ are shown.
  std::vector<Field> fingerprint = {};
  // What this rank computes on: "cpu", "cuda". Must be the same on all ranks.
  std::string device = "cpu";
  // From the first rank's call to the last one's return. Default: ANNULUS_BOOTSTRAP_TIMEOUT, else 60 s.
  std::optional<Seconds> timeout = std::nullopt;
  // Numbers the ranks host by host, whatever the launcher did (a cyclic distribution, say): Job::rank and the rank in
  // Job::world are then in the order of rank_order_by_host, so that neighbouring ranks share a host where they can.
  // Job::launch keeps the launcher's number, which log files bear.
  bool host_by_host = false;
  // How users start the ranks of this program, up to their number: for messages.
  std::string start = "mpirun -n";
  // Prints the message of the rank that speaks for all. Default: one line on stderr. Thread-safe, please.
  std::function<void(const std::string&)> report = nullptr;
};

// Member order matters: the communicator goes before the runtime.
struct Job {
  LaunchInfo launch;
  std::shared_ptr<MpiRuntime> runtime;  // null: one rank by itself; MPI was never touched
  std::shared_ptr<comm_internal::Presence> presence;
  std::shared_ptr<Communicator> world;  // CPU tensors
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host, in rank order
  int local_size = 1;
  std::string host;
  std::function<void(const std::string&)> report;

  // Collective. As annulus::require_agreement, but a disagreement is printed once, and ends in ReportedError on all.
  void require_agreement(const std::vector<Field>& fields, OpLabel label);

  // Collective. As `together` (comm/agreement.h), but rank 0 prints the one error, and all ranks end in ReportedError.
  // For what may fail on one rank alone: opening a file, choosing a device. Where step communicates, what fails in it
  // must fail on all ranks.
  void run_together(OpLabel label, const std::function<void()>& step);
};

// hosts[r] is the host of rank r. The ranks host by host: hosts in the order of their lowest ranks, the ranks of a host
// by number. Rank 0 stays the first.
std::vector<int> rank_order_by_host(const std::vector<std::string>& hosts);

// Collective over the processes that the launcher started. Within the deadline either every rank has its Job or every
// rank ends with one message:
// - ranks that disagree: ReportedError(kMismatch) naming ranks and fields on all of them;
// - a world of another size than was started, e.g. by the mpirun of another MPI: Error(kComm);
// - a launcher that gives annulus no ranks (torchrun) started more processes: Error(kUnavailable). ANNULUS_WORLD_SIZE=1
//   says that each of them is to compute for itself;
// - a rank that never comes, is stopped or dies: the message names it where that can be known (same host), and the
//   process ends with _exit(6), because calls into MPI cannot be taken back.
Job bootstrap(const BootstrapOptions& options);

}  // namespace annulus
