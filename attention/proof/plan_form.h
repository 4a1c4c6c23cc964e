// The JSON form of a whole plan, by which other programs can make plans, read them, and have them proved. `annulus plan
// --out` writes it and `annulus prove` reads it. docs/reference/formats.md, "Plans", describes it completely.
//
// A form from outside is never trusted: whatever would index beyond something, overflow, or take more memory than is
// free is refused while it is read, with the path to it in the form. The verifier judges the rest.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "attention/proof/verifier.h"
#include "memory/available.h"

namespace annulus {

inline constexpr int64_t kPlanFormVersion = 1;

// The most that a rank holds in each direction, as a form says: Traffic::peak_*_rows. It need not say anything.
struct HeldRows {
  struct Peaks {
    std::optional<int64_t> kv, grad, queries, results;
    bool any() const { return kv || grad || queries || results; }
  };
  Peaks forward, backward;
};

// Returns what a program really holds. It must be proved, or what a schedule has made.
HeldRows held_rows(const Program& program);

// ---- Writing

// Writes a plan rank by rank, so that only one program needs to be in memory. Not thread safe.
class PlanFormWriter {
 public:
  // `write` takes the next part of the text.
  explicit PlanFormWriter(std::function<void(std::string_view)> write);

  // Writes the next rank's program and what it says that it holds. All programs are of one plan, in rank order, and may
  // be wrong. Raises Error(kPlan) if the form cannot name what the pattern counts: a mask of tokens from no file.
  void add(const Program& program, const HeldRows& held);
  // Ends the form, after the programs of all ranks.
  void finish();

 private:
  const std::function<void(std::string_view)> write_;
  int ranks_ = 0;  // written so far
};

// ---- Reading

struct PlanForm {
  // Its shape, pattern, ranks and `within`, and its schedule if annulus has one of that name. Its layout means nothing.
  PlanRequest request;
  std::string schedule;  // the name that the form gives, or ""
  std::shared_ptr<const Pattern> pattern;
  Layout queries, keys;           // what the ranks own
  std::vector<Program> programs;  // of all ranks, in rank order; spans with one member have the stride 1
  std::vector<HeldRows> held;     // by rank
};

struct PlanFormSource {
  std::string name;  // of the file, for messages
  // Returns the pattern with the files loaded that it names (runtime/tensor_files/block_map_file.h); null: it may name
  // none.
  std::function<PatternSpec(const PatternSpec&, const AttentionShape&)> load = nullptr;
  // What the programs and their proof may take; empty: anything. By default what is free.
  std::optional<AvailableMemory> free = available_memory();
};

// Reads a form to its end. Only one rank's part is in memory besides the programs. Raises Error(kInput), which names
// the source and the path to the value and says what was expected, if it is not a form of a plan: not JSON, unknown or
// missing keys, values of wrong types or beyond what they index, or positions that no rank or several ranks own. Raises
// Error(kResource) before the programs and their proof would take more than `source.free`, and what `source.load`
// raises. Thread safe.
PlanForm read_plan_form(std::istream& in, const PlanFormSource& source);

// ---- Proving

// Proves a plan as verify() does and then, for each rank and direction, that it holds as many rows as the form says.
Proof prove(const PlanForm& form, int max_faults = 8, const std::function<void(int)>& proved = nullptr);

}  // namespace annulus
