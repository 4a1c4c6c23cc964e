// See bootstrap.h.
#include "comm/bootstrap/bootstrap.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <numeric>
#include <thread>

#include "comm/agreement.h"
#include "comm/bootstrap/presence.h"
#include "comm/checks.h"
#include "comm/hosts.h"
#include "comm/threads/threads.h"
#include "comm/watchdog.h"
#include "common/environment.h"
#include "common/logging/log.h"
#include "common/text.h"

namespace annulus {
namespace {

using namespace comm_internal;

// Rank 0 reports the error. The barrier makes the other ranks wait for that: when a rank exits, the launcher ends the
// others.
[[noreturn]] void fail_together(Job& job, const Error& error) {
  if (job.rank == 0) job.report(error);
  try {
    job.world->barrier({"reporting an error", 0});
  } catch (const Error&) {
    // The error below is raised even if a rank is gone by now.
  }
  throw ReportedError(error);
}

void check_size(const LaunchInfo& launch, int expected, int formed, const std::string& version,
                const std::string& start) {
  if (expected <= 0 || expected == formed) return;
  std::string message = "MPI formed a world of " + counted(formed, "rank") + ", but " + std::to_string(expected) +
                        (expected == 1 ? " was started" : " were started");
  if (formed == 1) {
    message += ": the launcher (" + launch.launcher + ") belongs to another MPI than this program, which uses " +
               version + "; start it with that MPI's own mpirun, under Slurm with srun --mpi=pmix";
  } else {
    message +=
        ": ANNULUS_WORLD_SIZE or the launcher's environment is not that of this job; unset ANNULUS_WORLD_SIZE "
        "or start the ranks with `" +
        start + " " + std::to_string(expected) + " ...`";
  }
  throw Error(ErrorKind::kComm, "comm", message);
}

// Refuses to let each process compute alone what was meant for all of them, unless ANNULUS_WORLD_SIZE (`expected`) has
// the number of ranks that there must be.
void check_announced(const Announcement& announced, int expected, int formed, const std::string& start) {
  if (expected > 0 || announced.size <= formed) return;
  const std::string size = std::to_string(announced.size);
  throw Error(ErrorKind::kUnavailable, "comm",
              announced.launcher + " started " + size + " processes (" + announced.variable + " = " + size +
                  "), but the ranks of annulus come through MPI, and this process sees " + std::to_string(formed) +
                  ": start them with `" + start + " " + size +
                  " ...`; or set ANNULUS_WORLD_SIZE=1 if each process is to compute for itself");
}

}  // namespace

void Job::require_agreement(const std::vector<Field>& fields, OpLabel label) {
  try {
    annulus::require_agreement(*world, fields, label);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kMismatch) throw;
    fail_together(*this, e);
  }
}

void Job::run_together(OpLabel label, const std::function<void()>& step) {
  if (const std::optional<Error> error = failure_of_any(*world, label, step)) fail_together(*this, *error);
}

std::vector<int> rank_order_by_host(const std::vector<std::string>& hosts) {
  std::vector<int> order(hosts.size());
  std::iota(order.begin(), order.end(), 0);
  const auto first_of = [&](int rank) {
    return std::find(hosts.begin(), hosts.end(), hosts[static_cast<size_t>(rank)]) - hosts.begin();
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first_of(a) < first_of(b); });
  return order;
}

Job bootstrap(const BootstrapOptions& options) {
  Job job;
  job.launch = launch_info();
  job.host = host_name();
  const auto log_it = [](const Error& error) { log_error_for_all(error.module(), error.message()); };
  job.report = options.report ? options.report : log_it;
  const int expected = job.launch.annulus_size;
  if (!job.launch.launched) {
    if (expected > 1) {
      throw Error(
          ErrorKind::kComm, "comm",
          "this process was not started by a launcher of ranks (mpirun, srun), but ANNULUS_WORLD_SIZE asks for " +
              counted(expected, "rank") + ": unset it, or start the ranks with `" + options.start + " " +
              std::to_string(expected) + " ...`");
    }
    check_announced(job.launch.announced, expected, 1, options.start);
    job.world = make_self_communicator();
    return job;
  }
  // The processes of a launcher that MPI's launcher started (srun starts a torchrun on each host) share a rank, so MPI
  // cannot start in them.
  if (job.launch.size > 0 && job.launch.announced.size > job.launch.size) {
    check_announced(job.launch.announced, expected, job.launch.size, options.start);
    if (expected == 1) {
      job.world = make_self_communicator();
      return job;
    }
  }

  const Seconds timeout =
      options.timeout.value_or(Seconds(number_from_environment("ANNULUS_BOOTSTRAP_TIMEOUT", 60, 0.1, 86400)));
  job.presence = std::make_shared<Presence>(job.launch);
  std::atomic<const char*> phase = "starting MPI";
  // The watchdog's thread calls this while this thread is stuck. One rank of each host reports. Hosts on which nothing
  // is wrong wait a second, so that a host on which something is wrong reports first: the first rank to exit ends the
  // job.
  const auto describe = [&, launch = job.launch, host = job.host, presence = job.presence]() -> std::string {
    bool local_fault = false;
    const std::string missing = describe_missing(launch, *presence, host, &local_fault);
    if (!local_fault) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (presence->claim_report()) {
      const Error error(ErrorKind::kComm, "comm",
                        missed_deadline("bootstrap: " + counted(launch.size, "rank") + " did not all come", timeout) +
                            " (" + phase.load() + "): " + missing +
                            "; see its log, or give it more time with ANNULUS_BOOTSTRAP_TIMEOUT (seconds)");
      if (options.report) {
        options.report(error);
      } else {
        log_last_words(LogLevel::kError, error.module(), error.message(), {.of_all = true});
      }
      // The claim ends with this process, so wait until the other ranks, whose deadlines are near, have found it taken.
      std::this_thread::sleep_for(std::chrono::seconds(2));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // so that the reporting rank can print
    }
    return "";
  };
  {
    const Watchdog watchdog(timeout, describe);
    // MPI's own deadline is longer than that of this watchdog, whose message has more details.
    MpiOptions mpi;
    mpi.timeout = timeout + Seconds(10);
    mpi.share_memory = switch_from_environment("ANNULUS_SHARED_MEMORY", true);
    mpi.describe_stalled = [launch = job.launch, presence = job.presence,
                            host = job.host](const std::function<int(int)>& in_job) {
      return describe_stalled(launch, *presence, host, in_job);
    };
    mpi.all_live = [presence = job.presence] { return presence->all_live(); };
    job.runtime = MpiRuntime::start(mpi);
    try {
      check_size(job.launch, expected > 0 ? expected : job.launch.size, job.runtime->size(), job.runtime->version(),
                 options.start);
      check_announced(job.launch.announced, expected, job.runtime->size(), options.start);
    } catch (const Error& e) {
      // Each process may be a world of its own here, and all of them find the error. The launcher's rank 0 reports it,
      // and the others wait for that, because the first rank to exit may end the job.
      job.runtime->abandon();
      if (job.launch.rank == 0) {
        job.report(e);
        job.presence->claim_report();
        std::this_thread::sleep_for(std::chrono::seconds(1));  // keeps the claim for so long
      } else {
        for (int i = 0; i < 30 && !job.presence->report_claimed(); ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
      }
      throw ReportedError(e);
    }
    phase = "making the communicator of all ranks";
    job.world = job.runtime->make_world();
    job.rank = job.world->rank();
    job.size = job.world->size();
    const Seconds usual = job.world->timeout();
    job.world->set_timeout(timeout + Seconds(10));

    phase = "initialization barrier";
    std::vector<Field> fields = options.fingerprint;
    fields.push_back({"device", options.device});
    fields.push_back({"MPI", job.runtime->version()});
    fields.push_back({"ranks", std::to_string(job.size)});
    job.require_agreement(fields, {"the start", 0});
    const std::string me = host_identity();
    std::vector<std::string> hosts = all_gather_text(*job.world, me, {"bootstrap: hosts", 0});
    if (options.host_by_host) {
      const std::vector<int> order = rank_order_by_host(hosts);
      if (!std::is_sorted(order.begin(), order.end())) {
        const auto place = std::find(order.begin(), order.end(), job.rank) - order.begin();
        job.world = job.world->split(0, static_cast<int>(place));
        job.rank = job.world->rank();
        std::vector<int> in_job(order.size());
        for (size_t rank = 0; rank < order.size(); ++rank)
          in_job[static_cast<size_t>(order[rank])] = static_cast<int>(rank);
        job.runtime->number_ranks(std::move(in_job));
        std::vector<std::string> in_order;
        for (int rank : order) in_order.push_back(hosts[static_cast<size_t>(rank)]);
        hosts = std::move(in_order);
      }
    }
    job.world->set_hosts(numbered(hosts));
    job.local_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), me));
    job.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + job.rank, me));
    job.world->barrier({"initialization barrier", 0});
    job.world->set_timeout(usual);
  }
  return job;
}

}  // namespace annulus
