// Findings as a table and as JSON. See host_checks.h.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "common/text.h"
#include "launcher/doctor/host_checks.h"

namespace annulus {

std::string_view to_string(Severity severity) {
  constexpr std::array<std::string_view, 4> kNames = {"good", "unknown", "warning", "error"};
  return kNames.at(static_cast<size_t>(severity));
}

const std::string& label_of(const HostReport& report) { return report.listed.empty() ? report.name : report.listed; }

std::string variable_of(const HostReport& report, const char* name) {
  const auto it = report.environment.find(name);
  return it == report.environment.end() ? "" : it->second;
}

std::string some_of(std::vector<std::string> hosts) {
  constexpr size_t kNamed = 4;
  const size_t more = hosts.size() > kNamed ? hosts.size() - kNamed : 0;
  hosts.resize(hosts.size() - more);
  return join(hosts, ", ") + (more > 0 ? " and " + std::to_string(more) + " more" : "");
}

std::string findings_table(const std::vector<Finding>& findings, bool all) {
  // A finding that several hosts share becomes one entry.
  struct Entry {
    const Finding* finding;
    std::vector<std::string> hosts;
  };
  std::vector<Entry> entries;
  for (const Finding& f : findings) {
    if (f.severity == Severity::kGood && !all) continue;
    const auto same = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) {
      return e.finding->check == f.check && e.finding->severity == f.severity && e.finding->found == f.found &&
             e.finding->remedy == f.remedy;
    });
    if (same == entries.end()) {
      entries.push_back({&f, {f.host}});
    } else {
      same->hosts.push_back(f.host);
    }
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.finding->severity > b.finding->severity; });
  size_t width = 0;
  for (const Entry& e : entries) width = std::max(width, e.finding->check.size());
  constexpr size_t kLine = 2000;
  std::string out;
  for (const Entry& e : entries) {
    std::string line = "  " + std::string(to_string(e.finding->severity));
    line.resize(std::max<size_t>(line.size(), 11), ' ');
    line += e.finding->check + std::string(width - e.finding->check.size() + 2, ' ');
    const size_t indent = line.size();
    const std::string hosts = some_of(e.hosts);
    out += line + printable((hosts.empty() ? "" : hosts + ": ") + e.finding->found, kLine) + '\n';
    if (!e.finding->remedy.empty())
      out += std::string(indent, ' ') + "-> " + printable(e.finding->remedy, kLine) + '\n';
  }
  return out;
}

nlohmann::json findings_json(const std::vector<Finding>& findings) {
  nlohmann::json list = nlohmann::json::array();
  for (const Finding& f : findings) {
    list.push_back({{"check", f.check},
                    {"severity", to_string(f.severity)},
                    {"host", f.host},
                    {"found", f.found},
                    {"remedy", f.remedy}});
  }
  return list;
}

}  // namespace annulus
