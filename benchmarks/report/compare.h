// `annulus bench compare OLD NEW`: tells ratios that got worse from ones that changed no more than measurements
// spread. Called by program/bench_verb.cc.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

enum class Verdict { kSame, kBetter, kWorse };

// A ratio counts as changed if it moved by more than margin * old ratio plus the larger of the two spreads (high -
// low). For example, from 1.00 (0.98 to 1.02) with a margin of 0.1 it may change by 0.14: 1.13 is kSame, 1.15 is
// kWorse.
double allowed_change(const BenchRatio& before, const BenchRatio& after, double margin);
Verdict judge(const BenchRatio& before, const BenchRatio& after, double margin);

// Prints each ratio that both reports have, and names those that only one has, those measured at other settings, and
// machines that differ. Returns the names of the ratios that got worse. Raises Error(kInput) if no ratio can be
// compared.
std::vector<std::string> compare_reports(const BenchReport& before, const BenchReport& after, double margin,
                                         std::ostream& out);

}  // namespace annulus
