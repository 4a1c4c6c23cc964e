// The tables of the reports on dilated-attention-pytorch, from which this project grew ("the seeds"): their rows with
// their figures, what is wrong in them, and beside each row what annulus measures. Used by seeds.cc and tests.
#pragma once

#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace annulus {

struct SeedRow {
  std::string name, theirs;
  std::string why_not = {};  // one sentence, if annulus has no figure beside this row
};

struct SeedTable {
  std::string name;    // by which `ours` finds it
  std::string source;  // the report's day and title, and its section
  std::string wrong;   // what is wrong in its figures, or does not follow from them
  std::string ours;    // what is measured beside them
  std::vector<SeedRow> rows;
};

// All tables, with their figures as they were printed; measured, if not said otherwise, on one NVIDIA GeForce GTX 1080.
const std::vector<SeedTable>& seed_tables();

// What was measured, by table and row.
using OurFigures = std::map<std::pair<std::string, std::string>, std::string>;

// The rows that have neither a figure nor a reason, and figures without a row: "table/row".
std::vector<std::string> missing_rows(const OurFigures& ours);

// Prints all tables with both sides. Raises Error(kInternal) if a row is missing.
void print_tables(const OurFigures& ours, std::ostream& out);

}  // namespace annulus
