// The checks of a host's processors, and of the threads that compute on them. See host_checks.h;
// docs/how-to/clusters.md lists these checks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/text.h"
#include "launcher/doctor/host_checks.h"

namespace annulus {
namespace {

// Whether threads spin for a millisecond or more, which 100,000 turns of the loop of GNU's library take at least. The
// value of its variable is a number with a suffix (k, M, G or T, powers of 1000) or without, or a word, "infinite". If
// it is anything else, the library takes 300,000.
bool spins_long(const std::string& spin_count) {
  const auto is_space = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
  std::string text;
  std::copy_if(spin_count.begin(), spin_count.end(), std::back_inserter(text), std::not_fn(is_space));
  if (text.empty()) return false;
  static constexpr std::string_view kSuffixes = "kmgt";
  double turns = 1;
  if (const size_t power = kSuffixes.find(lower_case(text).back()); power != std::string_view::npos) {
    turns = std::pow(1000.0, static_cast<double>(power + 1));
    text.pop_back();
  }
  const auto number = number_of_text<uint64_t>(text);
  return !number || static_cast<double>(*number) * turns >= 100000;
}

Finding cores(const HostReport& report, int ranks) {
  const Machine& machine = report.host.machine;
  const int64_t cores = static_cast<int64_t>(machine.cores.size()), threads = machine.cpus().size();
  const double quota = machine.cpu_quota;
  std::string text = counted(cores, "core");
  if (quota > 0 && quota < static_cast<double>(cores)) {
    text += ", of which the control group allows the time of " + significant(quota, 4) + ",";
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
  const std::string omp = variable_of(report, "OMP_NUM_THREADS");
  const auto wanted = leading_number<int64_t>(omp);
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
  for (const char* const name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}) {
    if (const std::string value = variable_of(report, name); !value.empty()) set.push_back(name + ("=" + value));
  }
  const std::string policy = variable_of(report, "OMP_WAIT_POLICY");
  if (policy != "active" && policy != "ACTIVE" && !spins_long(variable_of(report, "GOMP_SPINCOUNT"))) {
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
