// Implements compare.h.
#include "benchmarks/report/compare.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "common/error.h"

namespace annulus {
namespace {

const BenchRatio* find(const BenchReport& report, const std::string& name) {
  const auto found =
      std::find_if(report.ratios.begin(), report.ratios.end(), [&](const BenchRatio& r) { return r.name == name; });
  return found == report.ratios.end() ? nullptr : &*found;
}

std::string padded(std::string text, size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text;
}

std::string with_spread(const BenchRatio& r) {
  char text[64];
  std::snprintf(text, sizeof text, "%.3f (%.3f to %.3f)", r.ratio, r.low, r.high);
  return text;
}

std::string source_line(const char* side, const BenchReport& report) {
  return std::string(side) + report.version + ", " + report.date + ", " + report.machine.text() + "\n";
}

std::string change(const BenchRatio& before, const BenchRatio& after) {
  char text[32] = "";
  if (before.ratio > 0) std::snprintf(text, sizeof text, "%+.1f %%", 100 * (after.ratio / before.ratio - 1));
  return text;
}

const char* word(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWorse:
      return "worse";
    case Verdict::kBetter:
      return "better";
    case Verdict::kSame:
      return "same";
  }
  return "";
}

void name_missing(const BenchReport& here, const BenchReport& there, const char* where, std::ostream& out) {
  for (const BenchRatio& r : here.ratios) {
    if (find(there, r.name) == nullptr) out << "only in the " << where << " file: " << r.name << "\n";
  }
}

}  // namespace

double allowed_change(const BenchRatio& before, const BenchRatio& after, double margin) {
  return margin * before.ratio + std::max(before.high - before.low, after.high - after.low);
}

Verdict judge(const BenchRatio& before, const BenchRatio& after, double margin) {
  const double allowed = allowed_change(before, after, margin);
  if (after.ratio - before.ratio > allowed) return Verdict::kWorse;
  return before.ratio - after.ratio > allowed ? Verdict::kBetter : Verdict::kSame;
}

std::vector<std::string> compare_reports(const BenchReport& before, const BenchReport& after, double margin,
                                         std::ostream& out) {
  out << source_line("old: ", before) << source_line("new: ", after);
  if (before.machine != after.machine) {
    out << "The machines differ: ratios of different machines may differ without any change of the program.\n";
  }
  size_t names = 5;
  for (const BenchRatio& r : before.ratios) names = std::max(names, r.name.size());
  std::vector<std::string> worse, elsewhere, invalid;
  int compared = 0;
  for (const BenchRatio& old : before.ratios) {
    const BenchRatio* const now = find(after, old.name);
    if (now == nullptr) continue;
    if (const std::string& why = old.invalid.empty() ? now->invalid : old.invalid; !why.empty()) {
      invalid.push_back(old.name + ": " + why);
      continue;
    }
    if (now->settings != old.settings) {
      elsewhere.push_back(old.name + " (old: " + old.settings + "; new: " + now->settings + ")");
      continue;
    }
    char figures[256];
    if (compared++ == 0) {
      std::snprintf(figures, sizeof figures, "  %-24s    %-24s  %9s  %8s\n", "old (quartiles)", "new (quartiles)",
                    "change", "allowed");
      out << "\n  " << padded("ratio", names) << figures;
    }
    const Verdict verdict = judge(old, *now, margin);
    if (verdict == Verdict::kWorse) worse.push_back(old.name);
    std::snprintf(figures, sizeof figures, "  %-24s -> %-24s  %9s  %8.3f  %s\n", with_spread(old).c_str(),
                  with_spread(*now).c_str(), change(old, *now).c_str(), allowed_change(old, *now, margin),
                  word(verdict));
    out << "  " << padded(old.name, names) << figures;
  }
  if (compared > 0) {
    char line[160];
    std::snprintf(line, sizeof line, "\nAllowed: %g of the old ratio plus the larger spread of both.\n", margin);
    out << line;
  }
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
