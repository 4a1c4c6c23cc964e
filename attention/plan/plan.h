// Plan: rank by rank and step by step, which rows travel, into which buffer, and which tiles are computed meanwhile.
// Plain data: made by a schedule (schedules.h), proved by the verifier (verifier.h), run by the executor (execution/).
//
// Numbers in a plan are rows and elements, never bytes of a dtype: a "row" is one position of one kv head of one batch
// row.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/pattern/span.h"
#include "attention/plan/layout.h"
#include "memory/byte_cache.h"

namespace annulus {

enum class ScheduleKind {
  kRing,
  kAllGather,
  kGroupCast,
  kAuto,  // group-cast where ranks need less than half of the others' rows on the whole, else ring; resolve_schedule
};

// "ring", "all-gather", "group-cast", "auto", in the order of ScheduleKind. parse raises as parse_layout does.
const std::vector<std::string>& schedule_names();
std::string_view to_string(ScheduleKind kind);
ScheduleKind parse_schedule(std::string_view name, std::string_view where);

// What a plan is made from; equal requests give equal plans on every rank.
struct PlanRequest {
  AttentionShape shape;
  PatternSpec pattern;
  LayoutKind layout = LayoutKind::kContiguous;
  ScheduleKind schedule = ScheduleKind::kAuto;
  int ranks = 1;
  bool even = false;                    // refuse lengths that do not give every rank the same share
  std::vector<int64_t> uneven_lengths;  // if not empty: contiguous parts of these lengths (queries and keys alike)
  // Whether a plan may keep the keys and values that a rank held last for the backward. Where it may not, they are sent
  // again, and what the backward needs of the forward has sizes that q, k and v alone tell.
  bool keep_last = true;

  std::string text() const;  // canonical: the fingerprint that ranks compare
  friend bool operator==(const PlanRequest&, const PlanRequest&) = default;
};

// Which rank owns which queries, and which keys.
Layout query_layout(const PlanRequest& request);
Layout key_layout(const PlanRequest& request);

// Key/value rows of some batch rows and kv heads, all of the same positions; stored [batch][positions, span after
// span][heads]. `positions` are global; together they are the block's row index 0, 1, 2, ...
struct RowBlock {
  Span batch;
  Span heads;  // kv heads
  std::vector<Span> positions;

  int64_t positions_count() const;
  int64_t rows() const { return batch.count * heads.count * positions_count(); }
  friend bool operator==(const RowBlock&, const RowBlock&) = default;
};

// A set of key/value rows: blocks that share no row, stored one after the other. More than one where heads or batch
// rows need different positions.
struct RowSet {
  std::vector<RowBlock> blocks;

  int64_t rows() const;
  friend bool operator==(const RowSet&, const RowSet&) = default;
};

// The first row of `part` within `whole` where all its rows lie there one after the other: it can be sent as it is, and
// needs no copy. Nothing where they do not.
std::optional<int64_t> consecutive_rows(const RowSet& whole, const RowSet& part);

// What a buffer holds. Buffers come in pairs of tensors: a key/value buffer is K and V, a gradient buffer dK and dV.
enum class BufferKind {
  kOwnKV,    // the caller's k and v: filled from the start
  kKV,       // travelling keys and values, in the inputs' dtype
  kSavedKV,  // the last-held keys and values, kept from the forward for the backward
  kGrad,     // travelling or waiting gradients, in the accumulator's dtype
  kOwnGrad,  // this rank's dk and dv: what the backward returns
};

struct Buffer {
  BufferKind kind = BufferKind::kKV;
  RowSet rows;  // all that it ever holds; it is filled once, by one transfer

  bool holds_gradient() const { return kind == BufferKind::kGrad || kind == BufferKind::kOwnGrad; }
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

// Both tensors of a buffer to or from a peer. A receive fills its buffer: `rows` are all of it. A send takes all of a
// gradient buffer, but of keys and values only those that are needed. Matches the peer's transfers in the order listed.
struct Transfer {
  int peer = 0;
  int buffer = 0;
  RowSet rows;

  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// One rectangle of (query rows, key rows), cut by a band, for the batch rows and query heads named. Row numbers are
// into this rank's q (queries) and into a block of a buffer (keys); the positions say which global positions these rows
// are, and the band is over positions.
struct Tile {
  int buffer = 0;        // keys and values
  int block = 0;         // which of the buffer's row blocks
  int grad_buffer = -1;  // backward: where this tile's dK and dV are added; -1 in the forward
  int grad_block = 0;
  Span batch;
  Span heads;  // query heads
  Span query_rows;
  Span query_positions;  // same count
  Span key_rows;
  Span key_positions;  // same count
  Span grad_rows;      // same count: rows of the gradient's block
  Band band;           // pairs outside are not counted; normalised to unbounded where it cuts nothing

  friend bool operator==(const Tile&, const Tile&) = default;
};

// dst += src, both gradient buffers; dst holds all rows of src. Moves the gradient: src is read no more.
struct Add {
  int dst = 0;
  int src = 0;

  friend bool operator==(const Add&, const Add&) = default;
};

// One step: start all transfers, compute the tiles meanwhile (in order, merging into out and lse, or adding into the
// gradient buffers), wait for the transfers, do the adds, in order. So tiles neither read nor change what is received
// in the step, and adds may: it has arrived. What is sent is changed by neither: a gradient that was sent is its
// receiver's. Both ends of a transfer lie in steps of the same number.
struct Step {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  std::vector<int> zero;  // gradient buffers set to zero before the step's tiles
  std::vector<Tile> tiles;
  std::vector<Add> adds;

  friend bool operator==(const Step&, const Step&) = default;
};

// One rank's part of a plan. Buffers are numbered across forward and backward; each direction allocates those it uses.
struct Program {
  PlanRequest request;
  int rank = 0;
  std::vector<Span> query_spans;  // what this rank owns, in storage order
  std::vector<Span> key_spans;
  std::vector<Buffer> buffers;
  std::vector<Step> forward;
  std::vector<Step> backward;
  int saved = -1;  // the kSavedKV buffer, or -1: the backward needs nothing but q, k, v, out, lse

  int64_t query_count() const;  // rows of this rank's q
  friend bool operator==(const Program&, const Program&) = default;
};

// Checks the request (ring-size validation: heads, lengths, layout against ranks) and raises Error(kPlan) with what
// would be valid. Every rank raises alike: it depends on the request alone. Called by make_program.
void validate(const PlanRequest& request);

// One rank's program. What other ranks need counts too: each slice is looked at with the ranks that hold its keys and
// those that hold its queries, but closely with few of them (docs/performance.md). Memory grows with this rank's steps
// and tiles.
Program make_program(const PlanRequest& request, int rank);
// All ranks' programs, in rank order, each the one that make_program makes, for less than one by one: what ranks need
// of each other is found once for all. For the verifier and `annulus plan`.
void for_each_program(const PlanRequest& request, const std::function<void(Program)>& take);
std::vector<Program> make_programs(const PlanRequest& request);
// Of any sum of slices over request.shape, in place of request.pattern: for patterns made by a program. Ranks compare
// requests, so the caller sees to it that they hold the same slices.
Program make_program(const PlanRequest& request, const Pattern& pattern, int rank);

// The same, cached by request and rank (memory/caches.h); thread-safe. `pattern_of(request)` likewise.
std::shared_ptr<const Program> cached_program(const PlanRequest& request, int rank);
std::shared_ptr<const Pattern> cached_pattern(const PlanRequest& request);

// Starts planning on another thread, for a request that the next step will make: cached_program of it then finds the
// program or waits for what is left. Errors surface there. Thread-safe. `then`, if given, runs on that thread
// afterwards; what it raises is dropped.
void plan_ahead(const PlanRequest& request, int rank, std::function<void(const Program&)> then = nullptr);

// Counted over the process.
struct PlanStats {
  int64_t patterns_made = 0;  // how often slices were made: 0 more in a step whose patterns are unchanged
  int64_t programs_made = 0;
  double seconds_on_path = 0;  // planning, or waiting for it: what steps waited, block selection included
  CacheStats patterns, programs;
};
PlanStats plan_stats();
// Adds to seconds_on_path: for planning outside cached_program.
void count_planning(double seconds);

// The request with `auto` replaced by the schedule it stands for; every rank comes to the same. Raises as validate.
PlanRequest resolve_schedule(const PlanRequest& request);

}  // namespace annulus
