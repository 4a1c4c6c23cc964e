// Implements kept.h.
#include "benchmarks/kept.h"

#include <algorithm>
#include <cctype>

#include "benchmarks/measure.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {

std::string kept_path(const std::string& folder, const std::string& isa) {
  std::string name;
  for (const char c : isa) {
    const auto byte = static_cast<unsigned char>(c);
    name += std::isalnum(byte) != 0 ? static_cast<char>(std::tolower(byte)) : '-';
  }
  return folder + "/ratios-" + name + ".json";
}

std::optional<BenchReport> read_kept(const std::string& folder, const std::string& isa) {
  const std::string path = kept_path(folder, isa);
  if (!is_file(path)) return {};
  BenchReport kept = read_report(path);
  if (kept.machine.isa != isa) {
    throw Error(
        ErrorKind::kInput, "bench",
        path + ": expected ratios measured with " + isa + ", as its name says, got those of " + kept.machine.isa);
  }
  return kept;
}

std::vector<std::string> compare_with_kept(const std::optional<BenchReport>& kept, const BenchReport& now,
                                           std::optional<double> fail_above, std::ostream& out) {
  const auto require = [&](int compared) {
    if (!fail_above || compared > 0) return;
    throw Error(ErrorKind::kInput, "bench",
                "--fail-above has nothing to hold: expected at least one ratio that is kept for " + now.machine.isa +
                    " at the same settings");
  };
  if (!kept) {
    out << "no ratios are kept for " << now.machine.isa << "\n" << std::flush;
    require(0);
    return {};
  }
  Width names = {5};
  for (const BenchRatio& r : now.ratios) names.value = std::max(names.value, static_cast<int>(r.name.size()));
  out << line("beside the ratios that are kept for %s: %s, %s, %s\n", now.machine.isa, kept->version, kept->date,
              kept->machine.text())
      << line("\n  %-*s  %8s  %8s  %9s\n", names, "ratio", "kept", "now", "change");
  std::vector<std::string> above;
  int compared = 0;
  for (const BenchRatio& r : now.ratios) {
    const BenchRatio* const before = find_ratio(*kept, r.name);
    std::string old = "-", change, why;
    if (!r.invalid.empty()) {
      why = "invalid: " + r.invalid;
    } else if (before == nullptr) {
      why = "none is kept for " + now.machine.isa;
    } else if (before->settings != r.settings) {
      why = "none is kept at these settings (kept: " + before->settings + "; now: " + r.settings + ")";
    } else if (!before->invalid.empty()) {
      why = "the kept one is invalid: " + before->invalid;
    } else {
      ++compared;
      old = line("%.3f", before->ratio);
      change = change_text(*before, r);
      if (fail_above && r.ratio > *fail_above * before->ratio) {
        above.push_back(r.name);
        why = line("above %g times", *fail_above);
      }
    }
    out << line("  %-*s  %8s  %8.3f  %9s%s\n", names, r.name, old, r.ratio, change, why.empty() ? "" : "  " + why);
  }
  out.flush();
  require(compared);
  return above;
}

}  // namespace annulus
