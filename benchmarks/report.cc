// Implements report.h.
#include "benchmarks/report.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "benchmarks/measure.h"
#include "common/error.h"
#include "common/files.h"
#include "common/simd/instruction_set.h"
#include "common/text.h"
#include "common/version.h"

namespace annulus {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "annulus-bench-1";

// A quantile of sorted numbers, interpolated linearly between neighbours.
double quantile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

// Reads values of objects of the file `source`, and says what is wrong with them; `where` is the object's place.
class Reader {
 public:
  explicit Reader(const std::string& source) : source_(source) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorKind::kInput, "bench",
                source_ + ": " + what + "; expected a file that `annulus bench ... --json FILE` wrote");
  }
  const Json& at(const Json& object, const std::string& key, const std::string& where) const {
    if (!object.is_object()) refuse(where + " is not an object");
    const auto found = object.find(key);
    if (found == object.end()) refuse(where + " has no \"" + key + "\"");
    return *found;
  }
  std::string string(const Json& object, const std::string& key, const std::string& where) const {
    const Json& value = at(object, key, where);
    if (!value.is_string()) refuse("\"" + key + "\" of " + where + " is not a string");
    return value.get<std::string>();
  }
  double number(const Json& object, const std::string& key, const std::string& where) const {
    const Json& value = at(object, key, where);
    if (value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() >= 0) return value.get<double>();
    refuse("\"" + key + "\" of " + where + " is not a number of at least 0");
  }
  int64_t count(const Json& object, const std::string& key, const std::string& where) const {
    const double value = number(object, key, where);
    if (value >= 1 && value <= 1e9 && value == std::floor(value)) return static_cast<int64_t>(value);
    refuse("\"" + key + "\" of " + where + " is not a whole number of at least 1");
  }

 private:
  const std::string& source_;
};

}  // namespace

BenchRatio ratio_of(std::string name, std::string settings, const std::vector<double>& costs,
                    const std::vector<double>& baseline, std::optional<double> goal) {
  std::vector<double> each;
  for (size_t i = 0; i < costs.size(); ++i) each.push_back(costs[i] / baseline[i]);
  std::sort(each.begin(), each.end());
  return {std::move(name),
          std::move(settings),
          least(costs) / least(baseline),
          quantile(each, 0.25),
          quantile(each, 0.75),
          static_cast<int64_t>(costs.size()),
          goal};
}

std::string BenchRatio::goal_text() const { return goal ? line("goal %.3f: %s", *goal, met_or_missed(met())) : ""; }

Json json_of(const BenchRatio& ratio) {
  Json entry = {{"name", ratio.name}, {"settings", ratio.settings}, {"ratio", ratio.ratio},
                {"low", ratio.low},   {"high", ratio.high},         {"rounds", ratio.rounds}};
  if (ratio.goal) entry["goal"] = *ratio.goal;
  if (!ratio.invalid.empty()) entry["invalid"] = ratio.invalid;
  return entry;
}

std::string BenchMachine::text() const { return counted(cores, "core") + ", " + isa; }

BenchReport report_of(std::vector<BenchRatio> ratios) {
  // Counts the cores of the whole machine, because the rank that writes the report may be bound to some of them.
  const int64_t cores = std::max<int64_t>(1, sysconf(_SC_NPROCESSORS_ONLN));
  return {{cores, instruction_set_name(instruction_set())}, kVersion, now(), std::move(ratios)};
}

void write_report(const BenchReport& report, const std::string& path) {
  Json ratios = Json::array();
  for (const BenchRatio& r : report.ratios) ratios.push_back(json_of(r));
  const Json json = {{"format", kFormat},
                     {"version", report.version},
                     {"date", report.date},
                     {"machine", {{"cores", report.machine.cores}, {"isa", report.machine.isa}}},
                     {"ratios", std::move(ratios)}};
  write_atomically(FileSystem::real(), path, json.dump(2) + "\n");
}

BenchReport parse_report(std::string_view text, const std::string& source) {
  const Reader read(source);
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::out_of_range&) {
    read.refuse("a number in it is too large");
  } catch (const Json::exception&) {
    read.refuse("this is not JSON");
  }
  if (const std::string format = read.string(json, "format", "the file"); format != kFormat) {
    read.refuse("its format is \"" + format + "\", not \"" + kFormat + "\"");
  }
  BenchReport report;
  report.version = read.string(json, "version", "the file");
  report.date = read.string(json, "date", "the file");
  const Json& machine = read.at(json, "machine", "the file");
  report.machine = {read.count(machine, "cores", "\"machine\""), read.string(machine, "isa", "\"machine\"")};
  const Json& ratios = read.at(json, "ratios", "the file");
  if (!ratios.is_array()) read.refuse("\"ratios\" is not a list");
  std::set<std::string> names;
  for (const Json& entry : ratios) {
    const std::string nth = "ratio " + std::to_string(report.ratios.size() + 1);
    BenchRatio r;
    r.name = read.string(entry, "name", nth);
    const std::string where = "\"" + r.name + "\"";
    if (!names.insert(r.name).second) read.refuse(where + " occurs twice");
    r.settings = read.string(entry, "settings", where);
    r.ratio = read.number(entry, "ratio", where);
    r.low = read.number(entry, "low", where);
    r.high = read.number(entry, "high", where);
    if (r.low > r.high) read.refuse("\"low\" of " + where + " is above its \"high\"");
    r.rounds = read.count(entry, "rounds", where);
    if (entry.contains("goal")) r.goal = read.number(entry, "goal", where);
    if (entry.contains("invalid")) r.invalid = read.string(entry, "invalid", where);
    report.ratios.push_back(std::move(r));
  }
  return report;
}

BenchReport read_report(const std::string& path) { return parse_report(read_small_file("bench", path), path); }

const BenchRatio* find_ratio(const BenchReport& report, const std::string& name) {
  const auto found =
      std::find_if(report.ratios.begin(), report.ratios.end(), [&](const BenchRatio& r) { return r.name == name; });
  return found == report.ratios.end() ? nullptr : &*found;
}

std::string change_text(const BenchRatio& before, const BenchRatio& after) {
  return before.ratio > 0 ? line("%+.1f %%", 100 * (after.ratio / before.ratio - 1)) : "";
}

namespace {

std::string with_spread(const BenchRatio& r) { return line("%.3f (%.3f to %.3f)", r.ratio, r.low, r.high); }

constexpr const char* kOutcomes[] = {"same", "better", "worse"};

void name_missing(const BenchReport& here, const BenchReport& there, const char* where, std::ostream& out) {
  for (const BenchRatio& r : here.ratios) {
    if (find_ratio(there, r.name) == nullptr) out << "only in the " << where << " file: " << r.name << "\n";
  }
}

}  // namespace

double allowed_change(const BenchRatio& before, const BenchRatio& after, double margin) {
  return margin * before.ratio + std::max(before.high - before.low, after.high - after.low);
}

Outcome judge(const BenchRatio& before, const BenchRatio& after, double margin) {
  const double allowed = allowed_change(before, after, margin);
  if (after.ratio - before.ratio > allowed) return Outcome::kWorse;
  return before.ratio - after.ratio > allowed ? Outcome::kBetter : Outcome::kSame;
}

std::vector<std::string> compare_reports(const BenchReport& before, const BenchReport& after, double margin,
                                         std::ostream& out) {
  for (const auto& [side, report] : {std::pair("old", &before), std::pair("new", &after)}) {
    out << line("%s: %s, %s, %s\n", side, report->version, report->date, report->machine.text());
  }
  if (before.machine != after.machine) {
    out << "The machines differ: ratios of different machines may differ without any change of the program.\n";
  }
  Width names = {5};
  for (const BenchRatio& r : before.ratios) names.value = std::max(names.value, static_cast<int>(r.name.size()));
  std::vector<std::string> worse, elsewhere, invalid;
  int compared = 0;
  for (const BenchRatio& old : before.ratios) {
    const BenchRatio* const now = find_ratio(after, old.name);
    if (now == nullptr) continue;
    if (const std::string& why = old.invalid.empty() ? now->invalid : old.invalid; !why.empty()) {
      invalid.push_back(old.name + ": " + why);
      continue;
    }
    if (now->settings != old.settings) {
      elsewhere.push_back(old.name + " (old: " + old.settings + "; new: " + now->settings + ")");
      continue;
    }
    if (compared++ == 0) {
      out << line("\n  %-*s  %-24s    %-24s  %9s  %8s\n", names, "ratio", "old (quartiles)", "new (quartiles)",
                  "change", "allowed");
    }
    const Outcome outcome = judge(old, *now, margin);
    if (outcome == Outcome::kWorse) worse.push_back(old.name);
    out << line("  %-*s  %-24s -> %-24s  %9s  %8.3f  %s\n", names, old.name, with_spread(old), with_spread(*now),
                change_text(old, *now), allowed_change(old, *now, margin), kOutcomes[static_cast<int>(outcome)]);
  }
  if (compared > 0) out << line("\nAllowed: %g of the old ratio plus the larger spread of both.\n", margin);
  name_missing(before, after, "old", out);
  name_missing(after, before, "new", out);
  for (const std::string& why : invalid) out << "invalid, not compared: " << why << "\n";
  for (const std::string& name : elsewhere) out << "measured at other settings, not compared: " << name << "\n";
  out.flush();
  if (compared == 0) {
    throw Error(ErrorKind::kInput, "bench",
                "there is nothing to compare: expected a ratio that both files have, measured at the same settings");
  }
  return worse;
}

}  // namespace annulus
