// What is wrong with a host, and with hosts beside each other: one check for each thing that goes wrong in practice,
// each with its remedy. `doctor` shows all, `launch` refuses or warns by them before ranks start.
//
// check_host is host_checks.cc, check_together and the table of differences hosts_together.cc, what is printed
// findings.cc. Thread safety: functions without state; they look at reports alone, so that a test plants any fault.
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
  std::string check;  // "locked-memory": its name, in docs/clusters.md and the JSON
  Severity severity = Severity::kGood;
  std::string host = {};    // as its list or the system calls it; empty: concerns all
  std::string found = {};   // "64 KiB"
  std::string remedy = {};  // what to do; empty where it is good
  // Of an error: what a job that it refuses ends with. kMismatch where hosts differ that must not.
  ErrorKind kind = ErrorKind::kUnavailable;
};

// What a job asks of hosts.
struct CheckRequest {
  std::vector<int> ranks = {};  // of each host; empty, for a single host: default_ranks
  std::vector<std::string> interfaces = {};
  std::string device = "auto";
  bool by_launch = false;  // `launch` starts the ranks, and sees itself to what plain mpirun has to be told
};

// How many ranks a host has that nobody gave a number: one a GPU, without GPUs one a NUMA node.
int default_ranks(const HostReport& report);

// Of one host alone, the i-th of the request: at least one finding for each check.
std::vector<Finding> check_host(const HostReport& report, const CheckRequest& request, size_t i);
// Of several beside each other: version, program, libraries, files, clocks, networks, one machine under two names.
// Nothing for a single one.
std::vector<Finding> check_together(const std::vector<HostReport>& reports, const CheckRequest& request);

// What differs between hosts, one row a member that is not the same on all, one column a host (where that is too wide,
// one line a value, with its hosts); "" where nothing does.
std::string difference_table(const std::vector<HostReport>& reports);

// How messages call a host: as the job's list does, otherwise as the system does.
const std::string& label_of(const HostReport& report);

// A table for people: the worst first; with `all`, what is good too. What several hosts share is said once. "" where
// there is nothing to show.
std::string findings_table(const std::vector<Finding>& findings, bool all);
nlohmann::json findings_json(const std::vector<Finding>& findings);

}  // namespace annulus
