// Schedules: functions that make one rank's steps. A new schedule needs a function here and a line in plan.cc; the
// executor, the verifier and the kernels need no change. Internal to attention/.
#pragma once

#include <string>
#include <vector>

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"

namespace annulus {

inline constexpr int kOwnKVBuffer = 0;
inline constexpr int kOwnGradBuffer = 1;
inline constexpr int kOwnQueriesBuffer = 2;  // these two only in programs that move queries
inline constexpr int kOwnResultsBuffer = 3;

// Makes the program of a request with a schedule that is not kAuto, without the masks of its pattern, which no schedule
// reads. `queries` and `keys` are the request's layouts, and `needs` are made from them.
Program program_of(const PlanRequest& request, Needs& needs, const Layout& queries, const Layout& keys, int rank);

// What a rank computes in a schedule that moves queries: some heads of the queries of some ranks with the keys of some
// ranks. Over all ranks, each head, rank of queries and rank of keys come together once.
struct QueryShare {
  std::vector<int> queries, keys;  // ranks, ascending
  Span heads;                      // query heads
};

// Returns a rank's share. The request must be valid, with such a schedule.
QueryShare query_share(const PlanRequest& request, int rank);

// Returns why a candidate of `auto` cannot have the bits of masks that it needs on these ranks, or "". Bits that have
// not been read yet will be those that the chosen schedule needs. Every rank comes to the same.
std::string why_bits_lack(const MaskPlanes& masks, const PlanRequest& candidate, const std::vector<int>& ranks);

// Each function adds buffers and steps to `program`, whose request, rank, spans and buffers 0 (kOwnKV) and 1 (kOwnGrad)
// are set.

// Ring: key/value blocks travel from rank to rank + 1, without the rows that no later rank needs. If the last rank
// needs every row that any other rank needs (full, causal zigzag), the backward runs in the opposite direction, from
// the block that each rank held last and saved. Otherwise it runs in the direction of the forward. The dK/dV of a block
// arrive while the rank computes with the block; the rank adds its part and sends the sum in the next step, and the
// last rank that needs the block sends it directly to the owner. (Ring Attention, arXiv 2310.01889;
// docs/explanation/attention.md describes this order of steps.)
void make_ring(Needs& needs, Program& program);

// All-gather: every rank receives, directly from the owners, all rows that any rank other than the owner needs, and
// computes the tiles of its own rows meanwhile. Gradients return to the owners, which add them in rank order. Suits
// short sequences.
void make_all_gather(Needs& needs, Program& program);

// Group-cast: all-gather in which each rank receives only the rows that it needs itself. No schedule that moves keys
// and values alone sends less.
//
// With inner groups of `within` ranks (more than one, and not all of them) a group receives every row only once, at
// the rank that has the owner's place in its group, which passes it on to those that need it while they compute with
// what has come from their own group. There the gradients are added up before they return: the receiver's own part,
// and then those of the others in rank order. So between groups no schedule that moves keys and values alone sends
// less, but a rank may receive rows that only others of its group need.
void make_group_cast(Needs& needs, Program& program);

// Double ring: a block travels in a ring inside each inner group of `within` ranks (a turn), one group after the other.
// The rank at which a turn begins also sends it, at the beginning of the turn, to the rank at which the next one
// begins. So between groups each rank sends one block of keys and values in a turn of the inner rings, without the
// rows that no later group needs, and each hop inside leaves out the rows that no later rank of the turn needs.
// Gradients are added up along each turn as in the ring, and the turn's sum goes straight to the owner: between groups
// one block in a turn, with the rows that the group needs. If the last rank of a block's way needs every row that
// other groups need (full, causal zigzag), the backward begins with the block that each rank held last and saved, and
// goes the opposite way; then keys and values cross between groups once less. `within` of 0 or of all ranks leaves one
// group, and the schedule is the ring.
void make_double_ring(Needs& needs, Program& program);

// Ulysses (arXiv 2309.14509): each rank of an inner group computes with some heads for all queries of the group.
// Queries, keys and values of these heads come to it, and results go home. Keys of other groups come by group-cast, or,
// with make_ulysses_ring, over a ring between the groups. Without `within` there is one group of all ranks.
void make_ulysses(Needs& needs, Program& program);
void make_ulysses_ring(Needs& needs, Program& program);

// Mesh (Mesh-Attention, arXiv 2512.20968): ranks form a grid. Each computes the queries of all ranks in its row of the
// grid (`within` ranks) with the keys of all ranks in its column, and partial results go home to be merged. Without
// `within`, the grid that sends least for a full mask is chosen.
void make_mesh(Needs& needs, Program& program);
// Returns the number of ranks in a row of the grid that sends least in a forward with a full mask, with inputs half as
// wide as results.
int mesh_columns(const PlanRequest& request);

}  // namespace annulus
