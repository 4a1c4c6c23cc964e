// The verifier proves a plan before any rank runs it: running it computes every counted pair exactly as often as the
// pattern counts it, cannot deadlock, never reads a buffer before it is filled, never overwrites one in use, and brings
// every gradient to its owner. Used by tests and `annulus plan` (all ranks' programs in one process) and by attention,
// where each rank proves its own program once for each request and compares its transfers with its peers
// (attention/execution/prove.h).
//
// The verifier shares no code with the planner's intersection of spans. It compares pairs by fingerprints instead of
// enumerating them (fingerprint.h), and simulates everything else (transfers, order, buffers) exactly. It proves about
// one rank's program alone:
//
//   1. It owns the positions that the layout gives it; a layout gives every position to one rank (layout.h).
//   2. Its tiles are the pattern's pairs of its queries, in the forward and again in the backward; where queries travel
//      to other ranks, the tiles of all ranks together are the pattern's pairs. Each tile names the storage rows of its
//      keys and queries correctly, and adds gradients to the rows of these keys and results to those of these queries.
//   3. In the order of a Step (plan.h), no buffer is sent, read or added to before it is filled; nothing arrives in a
//      full buffer; and a buffer is not used before its content has arrived.
//   4. Gradients are moved, never copied and never dropped. The whole content of a gradient buffer leaves it exactly
//      once, either to a peer or by an Add to a buffer that has all of its rows, and nothing is added to it afterwards.
//      Only this rank's own gradients stay. The same holds for results (out and lse, or dq): those of other ranks'
//      queries move to a buffer of results when their computation ends, which happens once and after their last tile.
//
// About all ranks together it proves that both ends of each transfer are in steps of the same number and name the same
// rows of the same kind, in the same order between two ranks. This proves the whole plan, because
//
//   - there is no deadlock: by induction all ranks finish step s, since its transfers depend on no other step, even if
//     a send waits for its receive;
//   - keys and values are right: by induction over steps, a buffer that is full (3) holds the rows that it names, since
//     it holds for each rank's own rows at the start (1) and both ends of a transfer name the same rows;
//   - gradients reach their owners: by 1 and 2, each counted pair contributes once to the row of its key, on one rank.
//   By
//     4 a contribution is at any time in exactly one buffer, in a row of its key, and can stay only in a rank's own
//     gradients; by 1 only the key's owner has that row there. So it is with results and their queries.
//
// So it suffices that each rank proves its own program and compares, with each peer, digests of their transfers, and
// that the fingerprints of all tiles add up. The
// cost of a rank's proof grows with its own tiles, rows and transfers.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

struct Proof {
  std::vector<std::string> faults;  // empty: the plan is proved. Each names the rank and, if known, direction and step.
  int64_t tiles = 0;
  int64_t transfers = 0;
  int64_t pairs = 0;  // that the pattern counts, over all heads and batch rows
  // Fingerprints (fingerprint.h) of the pairs of all tiles, forward and backward, and of the pattern's. Of all ranks
  // together they are equal.
  std::array<uint64_t, 2> computed{};
  uint64_t expected = 0;

  bool holds() const { return faults.empty(); }
};

// Proves a plan from the programs of all its ranks, in rank order. Lists at most `max_faults` faults. Calls `proved(n)`
// when n ranks are done. Raises Error(kPlan) if the programs are not of one plan. Thread safe.
Proof verify(const std::vector<Program>& programs, int max_faults = 8,
             const std::function<void(int)>& proved = nullptr);
// Proves programs that were made for `pattern` instead of the request's pattern.
Proof verify(const std::vector<Program>& programs, const Pattern& pattern, int max_faults = 8,
             const std::function<void(int)>& proved = nullptr);
// Proves programs whose ranks own what these layouts give them, instead of the request's layout: plans that others have
// made (plan_form.h).
Proof verify(const std::vector<Program>& programs, const Pattern& pattern, const Layout& queries, const Layout& keys,
             int max_faults = 8, const std::function<void(int)>& proved = nullptr);
// Estimates the bytes that verify takes besides the programs: proportional to the positions times the distinct strides
// of the slices. A double, because lengths may be 2^40.
double proof_bytes(const PlanRequest& request, const Pattern& pattern);
// Likewise for programs, whose tiles may have any strides.
double proof_bytes(const std::vector<Program>& programs, const Pattern& pattern);

// Makes all programs of a request and proves them.
Proof verify(const PlanRequest& request, int max_faults = 8);

// ---- One rank's share

// Proves one rank's program alone (1 to 4 above), and counts only its tiles, transfers and pairs, with fingerprints of
// these. Thread safe.
Proof verify_rank(const Program& program, const Pattern& pattern, int max_faults = 8);

// The transfers from one rank to another according to the program of one of them: their number, and a hash of the step,
// kind and rows of each, in order.
struct TransferDigest {
  int64_t transfers = 0;
  uint64_t content = 0;
  friend bool operator==(const TransferDigest&, const TransferDigest&) = default;
};
using PairDigest = std::array<TransferDigest, 2>;  // forward, backward

// Return the digests of a program's sends to each rank, or receives from each, in rank order, without transfers whose
// rank or buffer does not exist.
std::vector<PairDigest> sent_digests(const Program& program);
std::vector<PairDigest> received_digests(const Program& program);

// Returns a fault for each direction in which the tiles of all ranks are not the pattern's pairs: by the proofs of the
// ranks, each of its own program.
std::vector<std::string> compare_pairs(const std::vector<std::array<uint64_t, 3>>& computed_and_expected);
// The fingerprints of one proof as compare_pairs takes them.
std::array<uint64_t, 3> fingerprints(const Proof& proof);

// Compares the sends of rank `from` to rank `to` with the receives of `to`. Returns a fault for each direction
// (forward, backward) that differs.
std::vector<std::string> compare_digests(int from, int to, const PairDigest& sent, const PairDigest& received);

}  // namespace annulus
