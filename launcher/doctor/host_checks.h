// Checks of one host, and of several hosts together: one check for each thing that goes wrong in practice, each with
// its remedy. `doctor` shows the findings; `launch` refuses a job or warns because of them before ranks start.
//
// host_checks.cc has check_host, processor_checks.cc a part of it, hosts_together.cc has check_together and
// difference_table, and findings.cc has the functions that print. Thread safe: functions without state. They use
// nothing but the reports, so that a test can plant any fault.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "launcher/hosts/host_report.h"

namespace annulus {

enum class Severity { kGood, kUnknown, kWarning, kError };
std::string_view to_string(Severity severity);  // "good", "unknown", "warning", "error"

struct Finding {
  std::string check;  // the name of the check, as in docs/how-to/clusters.md and the JSON: "locked-memory"
  Severity severity = Severity::kGood;
  std::string host = {};    // the host's label (label_of); empty: all hosts
  std::string found = {};   // what was found: "64 KiB"
  std::string remedy = {};  // what to do; empty if nothing is wrong
  // For an error, the kind of error that ends the job: kMismatch if hosts differ that must be the same.
  ErrorKind kind = ErrorKind::kUnavailable;
};

// What a job needs from its hosts.
struct CheckRequest {
  std::vector<int> ranks = {};  // the number of ranks on each host; a missing one is default_ranks
  std::vector<std::string> interfaces = {};
  std::string device = "auto";
  bool by_launch = false;  // `launch` starts the ranks and adds the options that plain mpirun would need
};

// The number of ranks on a host if none is given: one per GPU, or without GPUs one per NUMA node.
int default_ranks(const HostReport& report);

// Checks one host, the i-th of the request. Returns at least one finding for each check.
std::vector<Finding> check_host(const HostReport& report, const CheckRequest& request, size_t i);
// The part of check_host that concerns processors and threads, for `ranks` ranks on the host.
std::vector<Finding> check_processors(const HostReport& report, int ranks);
// Checks several hosts together: version, program, libraries, files, clocks, networks, one machine under two names.
// Returns nothing for a single host.
std::vector<Finding> check_together(const std::vector<HostReport>& reports, const CheckRequest& request);

// A table of what differs between hosts, with one row per differing member and one column per host, or, if that is too
// wide, one line per member with its values and their hosts. "" if nothing differs.
std::string difference_table(const std::vector<HostReport>& reports);

// The name of a host in messages: the one in the job's list, or else the host's own.
const std::string& label_of(const HostReport& report);

// "a, b, c, d and 5 more": at most four are named, the others counted.
std::string some_of(std::vector<std::string> hosts);

// The value of a variable in the environment that the host's processes have; empty if it is not set.
std::string variable_of(const HostReport& report, const char* name);

// A table of the findings, the worst first; with `all`, it includes those that are good. A finding that several hosts
// share has one entry. "" if there is nothing to show.
std::string findings_table(const std::vector<Finding>& findings, bool all);
nlohmann::json findings_json(const std::vector<Finding>& findings);

}  // namespace annulus
