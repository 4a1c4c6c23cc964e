// The ratios that benchmarks/results keeps for each instruction set, beside which `bench compare` prints those of a
// run. Ratios of different instruction sets say nothing about each other, because more of them may speed up one side
// and not the other. Those of different processors may differ, too, so that `compare` fails by them only where it is
// asked to. Used by program/bench_subcommand.cc and tests.
//
// What is kept is a report (report.h) in a file named after its instruction set: `bench all --json` writes it.
#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report.h"

namespace annulus {

// The file of this instruction set: "FOLDER/ratios-avx-512.json" for "AVX-512".
std::string kept_path(const std::string& folder, const std::string& isa);

// Reads that file; nothing if there is none. Raises Error(kInput) as read_report does, and if the report in it is of
// another instruction set.
std::optional<BenchReport> read_kept(const std::string& folder, const std::string& isa);

// Prints each ratio of `now` with the kept one and the change, and says of which none is kept, or one at other
// settings; without `kept` only that there is nothing. With `fail_above`, returns the names of those that are more than
// this many times the kept one, and raises Error(kInput) if there is none to compare with.
std::vector<std::string> compare_with_kept(const std::optional<BenchReport>& kept, const BenchReport& now,
                                           std::optional<double> fail_above, std::ostream& out);

}  // namespace annulus
