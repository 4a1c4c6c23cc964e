// The checks of a host's processors, and of the threads that compute on them. See host_checks.h; docs/clusters.md has a
// table of these checks.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <system_error>
#include <vector>

#include "common/text.h"
#include "launcher/doctor/host_checks.h"

namespace annulus {
namespace {

std::string variable_of(const HostReport& report, const char* name) {
  const auto it = report.environment.find(name);
  return it == report.environment.end() ? "" : it->second;
}

// Whether the variable is `most` or more, or a word such as "infinite".
bool spins(const HostReport& report, const char* name, double most) {
  const std::string value = variable_of(report, name);
  if (value.empty()) return false;
  double number = 0;
  const bool is_number = std::from_chars(value.data(), value.data() + value.size(), number).ec == std::errc();
  return !is_number || number >= most;
}

Finding cores(const HostReport& report, int ranks) {
  const Machine& machine = report.host.machine;
  const int64_t cores = static_cast<int64_t>(machine.cores.size()), threads = machine.cpus().size();
  const double quota = machine.cpu_quota;
  std::string text = counted(cores, "core");
  if (quota > 0) {
    text += ", of which the control group allows the time of " + exact(std::round(quota * 100) / 100) + ",";
  }
  text += " for " + counted(ranks, "rank");
  const auto finding = [&](Severity severity, const std::string& found, const std::string& remedy) {
    return Finding{"cores", severity, label_of(report), found, remedy};
  };
  if (cores < ranks || (quota > 0 && quota < ranks)) {
    return finding(Severity::kWarning, text + ": ranks share cores and wait for one another",
                   "start fewer ranks on this host, or let the process have more cores (taskset, cgroup, Slurm's "
                   "--cpus-per-task, docker's --cpuset-cpus and --cpus)");
  }
  int64_t wanted = 0;
  const std::string omp = variable_of(report, "OMP_NUM_THREADS");
  std::from_chars(omp.data(), omp.data() + omp.size(), wanted);
  const bool over_quota = quota > 0 && static_cast<double>(wanted * ranks) >= quota + 1;
  if (wanted * ranks > threads || over_quota) {
    return finding(Severity::kWarning,
                   text + ", but OMP_NUM_THREADS=" + omp + " makes " + with_commas(wanted * ranks) + " threads on " +
                       counted(threads, "hardware thread"),
                   "unset OMP_NUM_THREADS: annulus gives each rank as many threads as it has cores, or less if the "
                   "control group allows less time");
  }
  return finding(Severity::kGood, text, "");
}

Finding thread_waits(const HostReport& report) {
  std::vector<std::string> set;
  for (const char* const name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) {
    if (const std::string value = variable_of(report, name); !value.empty()) set.push_back(name + ("=" + value));
  }
  const std::string policy = variable_of(report, "OMP_WAIT_POLICY");
  // GNU's library counts turns of a loop, of which 100,000 take a millisecond or more; Intel's counts milliseconds.
  if (policy != "active" && policy != "ACTIVE" && !spins(report, "GOMP_SPINCOUNT", 100000) &&
      !spins(report, "KMP_BLOCKTIME", 1)) {
    return {"thread-waits", Severity::kGood, label_of(report),
            set.empty() ? "each rank has one thread" : "threads that wait give up their cores: " + join(set, ", ")};
  }
  return {"thread-waits", Severity::kWarning, label_of(report),
          join(set, ", ") +
              ": threads that wait keep their cores busy, which slows down those that have work where other programs "
              "run or a control group limits the processors' time",
          "unset these variables: annulus lets threads that wait give up their cores"};
}

}  // namespace

std::vector<Finding> check_processors(const HostReport& report, int ranks) {
  return {cores(report, ranks), thread_waits(report)};
}

}  // namespace annulus
