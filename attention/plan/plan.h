// Plan: says for each rank and step which rows travel, into which buffer, and which tiles are computed meanwhile. A
// plan is plain data. A schedule makes it (schedules.h), the verifier proves it (verifier.h), and the executor runs it
// (attention/execution). docs/attention.md has worked examples.
//
// A plan counts rows, never bytes of a dtype. A "row" is one position of one kv head of one batch row.
#pragma once

#include <atomic>
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

namespace annulus {

enum class ScheduleKind {
  kRing,
  kAllGather,
  kGroupCast,
  kAuto,  // group-cast if ranks need less than half of all other ranks' rows in total, else ring (resolve_schedule)
};

// "ring", "all-gather", "group-cast", "auto", in the order of ScheduleKind. parse_schedule raises like parse_layout.
const std::vector<std::string>& schedule_names();
std::string_view to_string(ScheduleKind kind);
ScheduleKind parse_schedule(std::string_view name, std::string_view where);

// What a plan is made from. Equal requests give equal plans on every rank.
struct PlanRequest {
  AttentionShape shape;
  PatternSpec pattern;
  LayoutKind layout = LayoutKind::kContiguous;
  ScheduleKind schedule = ScheduleKind::kAuto;
  int ranks = 1;
  bool even = false;                         // refuses lengths that do not give every rank the same share
  std::vector<int64_t> uneven_lengths = {};  // if not empty: contiguous parts of these lengths (queries and keys alike)
  // Whether a plan may keep, for the backward, the keys and values that a rank held last. If not, they are sent again,
  // and the sizes of all that the backward needs of the forward follow from q, k and v alone.
  bool keep_last = true;

  std::string text() const;  // the canonical text that ranks compare; leaves out `even`, which changes no plan
  friend bool operator==(const PlanRequest&, const PlanRequest&) = default;
};

// The layouts that say which rank owns which queries, and which keys.
Layout query_layout(const PlanRequest& request);
Layout key_layout(const PlanRequest& request);

// The key/value rows of some batch rows and kv heads at the same positions, stored as [batch][positions, span after
// span][heads]. `positions` are global; in their order they are the block's rows 0, 1, 2, ...
struct RowBlock {
  Span batch;
  Span heads;  // kv heads
  std::vector<Span> positions;

  int64_t positions_count() const;
  int64_t rows() const { return batch.count * heads.count * positions_count(); }
  friend bool operator==(const RowBlock&, const RowBlock&) = default;
};

// A set of key/value rows: blocks that share no row, stored one after the other. There is more than one block if heads
// or batch rows need different positions.
struct RowSet {
  std::vector<RowBlock> blocks;

  int64_t rows() const;
  friend bool operator==(const RowSet&, const RowSet&) = default;
};

// If the rows of `part` lie one after the other in the storage of `whole`, the row of `whole` where they begin, so that
// they can be sent without a copy; otherwise nothing.
std::optional<int64_t> consecutive_rows(const RowSet& whole, const RowSet& part);

// What a buffer holds. Buffers come in pairs of tensors: a key/value buffer is K and V, a gradient buffer dK and dV.
enum class BufferKind {
  kOwnKV,    // the caller's k and v, which are there from the start
  kKV,       // travelling keys and values, in the inputs' dtype
  kSavedKV,  // the keys and values that the rank held last in the forward, kept for the backward
  kGrad,     // travelling or waiting gradients, in the accumulator's dtype
  kOwnGrad,  // this rank's dk and dv: what the backward returns
};

struct Buffer {
  BufferKind kind = BufferKind::kKV;
  RowSet rows;  // all rows that it ever holds; a travelling block is filled once, by one transfer

  bool holds_gradient() const { return kind == BufferKind::kGrad || kind == BufferKind::kOwnGrad; }
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

// Sends both tensors of a buffer to a peer, or receives them. A receive fills its buffer, so `rows` are all of the
// buffer's rows. A send moves all rows of a gradient buffer, but of keys and values only the rows that are needed. The
// n-th send to a peer matches the peer's n-th receive from this rank.
struct Transfer {
  int peer = 0;
  int buffer = 0;
  RowSet rows;

  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// One rectangle of (query rows, key rows), cut by a band, for some batch rows and query heads. Row numbers count rows
// of this rank's q (queries) and of a block of a buffer (keys). The positions are the global positions of these rows,
// and the band is over positions.
struct Tile {
  int buffer = 0;        // the buffer with the keys and values
  int block = 0;         // the index of the row block in the buffer
  int grad_buffer = -1;  // backward: the buffer to which this tile's dK and dV are added; -1 in the forward
  int grad_block = 0;
  Span batch;
  Span heads;  // query heads
  Span query_rows;
  Span query_positions;  // as many as query_rows
  Span key_rows;
  Span key_positions;  // as many as key_rows
  Span grad_rows;      // backward: rows of the gradient's block, as many as key_rows
  Band band;           // pairs outside are not counted; a side that cuts nothing is unbounded

  friend bool operator==(const Tile&, const Tile&) = default;
};

// dst += src. Both are gradient buffers, and dst has all rows of src. This moves the gradient: src is not read again.
struct Add {
  int dst = 0;
  int src = 0;

  friend bool operator==(const Add&, const Add&) = default;
};

// One step of a rank. The executor starts all transfers, computes the tiles meanwhile (in order, merging into out and
// lse or adding to the gradient buffers), waits for the transfers, and then does the adds in order. So tiles neither
// read nor change what the step receives, but adds may, because it has arrived. Neither may change what the step sends;
// a gradient that was sent belongs to its receiver. Both ends of a transfer lie in steps of the same number.
struct Step {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  std::vector<int> zero;  // gradient buffers set to zero before the step's tiles
  std::vector<Tile> tiles;
  std::vector<Add> adds;

  friend bool operator==(const Step&, const Step&) = default;
};

// A number that no other object of the process has or had, so that what is made from an object can be found again by
// its number. A copy, also one made by moving, has a number of its own. All numbers are equal in comparisons, because
// they are not part of an object's value.
class ObjectNumber {
 public:
  ObjectNumber() = default;
  ObjectNumber(const ObjectNumber&) {}
  ObjectNumber& operator=(const ObjectNumber&) {
    value_ = next();
    return *this;
  }
  uint64_t value() const { return value_; }  // at least 1
  friend bool operator==(const ObjectNumber&, const ObjectNumber&) { return true; }

 private:
  static uint64_t next() {
    static std::atomic<uint64_t> last = 0;
    return ++last;
  }
  uint64_t value_ = next();
};

// One rank's part of a plan. Forward and backward share one numbering of buffers; each direction allocates those that
// it uses. Kernels keep what they made from a program's tiles under its number, so tiles that have been computed must
// not be changed; change a copy.
struct Program {
  PlanRequest request;
  int rank = 0;
  std::vector<Span> query_spans;  // the positions that this rank owns, in storage order
  std::vector<Span> key_spans;
  std::vector<Buffer> buffers;
  std::vector<Step> forward;
  std::vector<Step> backward;
  int saved = -1;  // the kSavedKV buffer, or -1: the backward needs nothing but q, k, v, out, lse
  ObjectNumber number;

  int64_t query_count() const;  // the number of positions in this rank's q
  friend bool operator==(const Program&, const Program&) = default;
};

// Checks a request (ranks, heads, lengths, pattern, and layout against ranks) and raises Error(kPlan) that says what
// would be valid. The result depends on the request alone, so all ranks raise the same error. make_program calls it.
void validate(const PlanRequest& request);

// Makes one rank's program. Raises Error(kPlan) if the request is invalid or `rank` is not one of its ranks. The time
// also depends on what other ranks need: each slice is compared with the ranks that hold its keys and those that hold
// its queries, though closely with only few of them (docs/performance.md). The program's memory grows with this rank's
// steps and tiles. Thread safe, as are the other functions here.
Program make_program(const PlanRequest& request, int rank);
// Make the programs of all ranks, in rank order, equal to those of make_program. This costs less than making them one
// by one, because what ranks need of each other is found once for all. Used by the verifier and `annulus plan`.
void for_each_program(const PlanRequest& request, const std::function<void(Program)>& take);
std::vector<Program> make_programs(const PlanRequest& request);
// Makes a program for any sum of slices over request.shape instead of request.pattern, for patterns made by a program.
// Ranks compare requests, not slices, so the caller must ensure that all ranks pass the same slices.
Program make_program(const PlanRequest& request, const Pattern& pattern, int rank);

// The pattern of a request from a cache (memory/caches.h: "patterns"), which makes it if it is missing. Raises what
// make_pattern raises. Thread safe.
std::shared_ptr<const Pattern> cached_pattern(const PlanRequest& request);

// The request with `auto` replaced by the schedule that it stands for, which is the same on every rank. Raises like
// validate.
PlanRequest resolve_schedule(const PlanRequest& request);

}  // namespace annulus
