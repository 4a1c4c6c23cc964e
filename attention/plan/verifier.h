// The verifier proves a plan before any rank starts: that running it computes every counted pair exactly as often as
// the pattern counts it, cannot deadlock, never reads a buffer that is not filled nor overwrites one in use, and brings
// every gradient home. Used by tests and `annulus plan` (all ranks' programs in one process) and by every call of
// attention (each rank proves its own program, and compares its transfers with its peers': execution/prove.h).
//
// It shares no code with the planner's intersection. Pairs are not enumerated but fingerprinted (fingerprint.h).
// Everything else (transfers, order, buffers) is followed exactly. What is proved of one rank's program, alone:
//
//   1. It owns the positions that the layout gives it; a layout gives every position to one rank (layout.h).
//   2. Its tiles are the pattern's pairs of its queries, in the forward and again in the backward; each names the
//      storage rows that its keys, queries, batch rows and heads lie in, and adds gradients to the rows of these keys.
//   3. In the order of a Step (plan.h): nothing is sent, read or added to before it is filled; nothing arrives in what
//      is full; what arrives is not touched before it is there.
//   4. Gradients are moved, never copied and never dropped: what a buffer holds leaves it exactly once, all of it, to a
//      peer or by an Add into another buffer, that holds all of its rows, and nothing is added to it from then on. Only
//      this rank's own gradients stay.
//
// And of all ranks together: both ends of each transfer lie in steps of the same number, and move the same rows of the
// same kind, in the same order between two ranks. That is the whole, because
//
//   - no deadlock: by induction all ranks finish step s, whose transfers ask for no other step, even where a send waits
//     for its receive;
//   - keys and values are right: by induction over steps, a buffer that is full (3) holds the rows that it names, since
//     each rank's own are there at the start (1) and a transfer moves rows that its source names to a buffer that names
//     the same;
//   - gradients get home: by 2, with 1, each counted pair adds to the row of its key once, on the rank of its query. By
//     4 a contribution is at any time in one buffer, in a row of its key, and it can stay only in own gradients; by 1
//     one rank alone has a row of that key there.
//
// So it is enough that each rank proves its own program and hears from each peer a digest of what that peer sends to
// it: one rank's proof grows with its own tiles and rows, and with ranks only by its transfers.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

struct Proof {
  std::vector<std::string> faults;  // empty: the plan is right. Each names rank, direction and step.
  int64_t tiles = 0;
  int64_t transfers = 0;
  int64_t pairs = 0;  // counted pairs of the pattern, all heads and batch rows

  bool holds() const { return faults.empty(); }
};

// All ranks' programs of one plan, in rank order. At most `max_faults` faults are listed. `proved(n)` is told when n
// ranks are done. Raises Error(kPlan) when the programs do not belong together. Thread-safe.
Proof verify(const std::vector<Program>& programs, int max_faults = 8,
             const std::function<void(int)>& proved = nullptr);
// Of programs that were made for other slices than the request's pattern.
Proof verify(const std::vector<Program>& programs, const Pattern& pattern, int max_faults = 8,
             const std::function<void(int)>& proved = nullptr);
// About the bytes that this takes besides the programs; the memory grows with positions and with the strides that
// slices have. In floating point: lengths may be 2^40.
double proof_bytes(const PlanRequest& request, const Pattern& pattern);

// The same for the plan of a request: makes all programs.
Proof verify(const PlanRequest& request, int max_faults = 8);

// ---- One rank's share

// What is proved of one rank's program alone (1 to 4 above); tiles, transfers and pairs are this rank's. Thread-safe.
Proof verify_rank(const Program& program, const Pattern& pattern, int max_faults = 8);

// The transfers from one rank to another, as one of the two has them in its program: their number, and a hash of step,
// kind and rows of each, in order.
struct TransferDigest {
  int64_t transfers = 0;
  uint64_t content = 0;
  friend bool operator==(const TransferDigest&, const TransferDigest&) = default;
};
using PairDigest = std::array<TransferDigest, 2>;  // forward, backward

// What a program sends to each rank, or receives from each, in rank order. Transfers that name no rank are left out.
std::vector<PairDigest> sent_digests(const Program& program);
std::vector<PairDigest> received_digests(const Program& program);

// Where what rank `from` says that it sends to rank `to` is not what `to` receives from it: a fault for each direction.
std::vector<std::string> compare_digests(int from, int to, const PairDigest& sent, const PairDigest& received);

}  // namespace annulus
