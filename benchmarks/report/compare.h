// `annulus bench compare OLD NEW`: what got worse, and what only looks so because measurements spread. Called by
// program/bench_verb.cc.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

enum class Verdict { kSame, kBetter, kWorse };

// A ratio changed where it moved by more than margin * old plus the larger of both spreads (high - low).
double allowed_change(const BenchRatio& before, const BenchRatio& after, double margin);
Verdict judge(const BenchRatio& before, const BenchRatio& after, double margin);

// Prints each ratio of both, old and new; names those that only one side has, that were measured at other settings, and
// machines that differ. Returns the names of the ratios that got worse. Raises Error(kInput) when no ratio can be
// compared.
std::vector<std::string> compare_reports(const BenchReport& before, const BenchReport& after, double margin,
                                         std::ostream& out);

}  // namespace annulus
