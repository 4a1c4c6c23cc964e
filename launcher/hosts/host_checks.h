// What is wrong with a host, and with hosts beside each other: one check for each thing that goes wrong in practice,
// each with its remedy. `doctor` shows all, `launch` refuses or warns by them before ranks start.
//
// Thread safety: functions without state; they look at reports alone, so that a test plants any fault.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/hosts/host_report.h"

namespace annulus {

enum class Severity { kGood, kUnknown, kWarning, kError };
std::string_view to_string(Severity severity);  // "good", "unknown", "warning", "error"

struct Finding {
  std::string check;  // "locked-memory": its name, in docs/user-guide.md and the JSON
  Severity severity = Severity::kGood;
  std::string host;    // empty: concerns all
  std::string found;   // "64 KiB"
  std::string remedy;  // what to do; empty where it is good
};

// What a job asks of hosts; `doctor` asks for one rank a GPU (without: a NUMA node).
struct CheckRequest {
  std::vector<int> ranks;  // of each host; empty: not known
  std::vector<std::string> interfaces;
  std::string device = "auto";
};

// Of one host alone; the i-th of the request.
std::vector<Finding> check_host(const HostReport& report, const CheckRequest& request, size_t i);
// Of several beside each other: version, program, libraries, files, clocks, interfaces, one machine under two names.
std::vector<Finding> check_together(const std::vector<HostReport>& reports, const CheckRequest& request);

// What differs between hosts, one row a member that is not the same on all, one column a host; "" where nothing does.
std::string difference_table(const std::vector<HostReport>& reports);

// A table for people: what is not good first; with `all`, what is good too.
std::string findings_table(const std::vector<Finding>& findings, bool all);
nlohmann::json findings_json(const std::vector<Finding>& findings);

}  // namespace annulus
