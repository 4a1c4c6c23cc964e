// Checks drawn rows and keys of attention against the oracle, where all pairs would be too many: for
// `attend --check rows=N` and for benchmarks of long sequences. Each rank has its part of the results; no rank ever has
// the whole of a tensor.
//
// What is computed in fp64 by the pattern's definition (attention/oracle/rows.h): out, lse and dq of the drawn rows
// from all keys that they count, and dk and dv of the drawn keys from all queries that count them. The latter take lse
// and out of these queries as the program has reported them, because computing them would cost all their pairs: so dk
// and dv are checked as functions of the reported forward, and a wrong out or lse is found where its row is drawn, or
// where dk and dv do not follow from it. The gradients of sinks are checked likewise, all of them.
//
// The cost: each drawn row or key asks the definition once for each position, and computes with the pairs
// that are counted. Ranks share the work: keys by contiguous parts whatever the layout, queries by the layout.
//
// An error is compared with what rounding allows (attention/oracle/rounding.h) for the terms, scores and number of
// pairs of its own row, so a row with few keys is held to more than the dense check (attend_check.h) holds it to.
//
// Thread safety: functions without state.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/dropout/dropout.h"
#include "attention/oracle/oracle.h"
#include "attention/pattern/pattern.h"
#include "attention/pattern/span.h"
#include "attention/plan/layout.h"
#include "comm/communicator.h"
#include "runtime/attend/attend_check.h"
#include "runtime/attend/random_input.h"

namespace annulus {

// How many rows and keys are drawn: `rows` of all (batch row, query head, query), and as many of all (batch row, kv
// head, key).
struct RowDraw {
  int64_t rows = 64;
  int64_t seed = 1;

  std::string text() const;  // "rows=64,seed=1"
};

// Reads "rows=64" or "rows=64,seed=7". Raises Error(kUsage), naming `where`, for anything else, and for less than one
// row.
RowDraw parse_row_draw(std::string_view text, std::string_view where);

// The problem whose results are checked; the same on all ranks.
struct AttendProblem {
  PatternSpec asked;    // the pattern as it was given
  PatternSpec pattern;  // the same with adaptive maps replaced by those that were used, which are checked as well
  AttentionShape shape;
  int64_t head_dim = 0;
  at::ScalarType dtype = at::kFloat;
  double scale = 1;
  OracleSoftmax softmax;
  Dropout dropout;
  Layout queries, keys;  // which rank reports the results of which positions
  // Returns the inputs at these positions, whichever rank has them, as a file or a generator has them; without backward
  // dout may be undefined. Called on every rank.
  std::function<RandomTensors(const std::vector<Span>& queries, const std::vector<Span>& keys)> inputs;
};

struct RowsReport {
  // One result: out, lse, dq, dk, dv or dsinks.
  struct Part {
    std::string name;
    double error = 0;   // the largest: relative to the terms of its row; of lse absolute; infinite for a NaN
    double share = 0;   // the largest error as a share of what rounding allows its row; more than 1 is a fault
    std::string where;  // the row with that share: "batch row 0, head 1, query 5"; empty if there is no row
  };
  std::vector<Part> parts;  // without backward only out and lse
  RowDraw draw;
  int64_t rows = 0, all_rows = 0;            // drawn uniformly, and there are
  int64_t keys = 0, all_keys = 0;            // 0 keys without backward
  int64_t border_rows = 0, border_keys = 0;  // drawn besides, where the parts of ranks begin and end
  std::vector<std::string> unchecked;        // one sentence's part each
  std::string selection_fault;               // what an adaptive map should not have selected for the drawn rows

  double share() const;  // the largest of the parts
  bool passed() const;
  // The most that a fault in this share of all rows (or keys), wherever they are, is missed with: (1 - share)^rows.
  double missed(double share) const;
  std::string errors() const;  // "out 1.2e-07, lse 3.1e-07, ...; at most 4.1 % of what rounding allows"
  std::string text() const;    // three lines: errors, what was checked, what was not
};

// Returns the queries of the rows that such a check draws, whose mask it looks at on every rank; otherwise each rank
// looks at that of its own queries alone.
std::vector<Span> drawn_queries(const RowDraw& draw, const AttentionShape& shape, const Layout& queries);

// Collective. `mine` has this rank's results at its positions in the layout's order, on any device: out divided by the
// pattern's output_divisor; dq, dk and dv undefined if there was no backward. Returns the same report on every rank.
// Raises Error(kUsage) where rounding allows so much that a check is meaningless, and what `inputs` raises on any rank.
RowsReport check_rows(Communicator& world, const AttendProblem& problem, const AttendResults& mine,
                      const RowDraw& draw);

}  // namespace annulus
