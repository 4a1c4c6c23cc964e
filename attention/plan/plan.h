// Plan: for each rank and step, the rows that are transferred, their buffers, and the tiles that are computed
// meanwhile. A plan is plain data. A schedule makes it (schedules.h), the verifier proves it (attention/proof), and the
// executor runs it (attention/execution). docs/explanation/attention.md has worked examples.
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
#include "attention/plan/machine.h"

namespace annulus {

enum class ScheduleKind {
  kRing,
  kAllGather,
  kGroupCast,
  kDoubleRing,
  kUlysses,
  kUlyssesRing,
  kMesh,
  kAuto,  // the one that is predicted to take least time (choice.h)
};

// "ring", "all-gather", "group-cast", "double-ring", "ulysses", "ulysses-ring", "mesh", "auto", in the order of
// ScheduleKind. parse_schedule raises like parse_layout.
const std::vector<std::string>& schedule_names();
std::string schedule_kinds();  // the same for help texts: "ring, all-gather, ..., mesh or auto"
std::string_view to_string(ScheduleKind kind);
ScheduleKind parse_schedule(std::string_view name, std::string_view where);
// Whether queries and their results travel, too.
bool moves_queries(ScheduleKind kind);

// As PlanTerms::memory: the schedules that hold the fewest bytes are to be chosen from, however much memory there is.
inline constexpr double kLeanest = -1;

// What the choice of `auto` depends on beside the problem.
struct PlanTerms {
  MachineProfile machine;
  int64_t head_dim = 128;
  int64_t element_bytes = 2;  // of q, k and v
  bool backward = true;       // whether a backward follows
  double memory = 0;          // bytes of a rank that attention may hold; 0: those of the machine; or kLeanest
  bool or_leanest = false;    // whether the leanest are chosen from where none holds as few, in place of an error
  int64_t layers = 1;         // how many calls keep something for the backward at a time

  double most_bytes() const { return memory > 0 ? memory : machine.memory; }  // 0: not known
};

// Terms that requests share. Null stands for an unknown machine: the profile "cpu", and the defaults above. They are
// compared by content.
class TermsPointer {
 public:
  TermsPointer() = default;
  TermsPointer(PlanTerms terms);

  const PlanTerms& operator*() const;
  const PlanTerms* operator->() const { return &**this; }
  // The name of the machine, and a digest of all terms; empty for null.
  std::string text() const;
  friend bool operator==(const TermsPointer& a, const TermsPointer& b) { return a.digest_ == b.digest_; }

 private:
  std::shared_ptr<const PlanTerms> terms_;
  std::string digest_;
};

// The input of the planner. Equal requests give equal plans on every rank.
struct PlanRequest {
  AttentionShape shape;
  PatternSpec pattern;
  LayoutKind layout = LayoutKind::kContiguous;
  ScheduleKind schedule = ScheduleKind::kAuto;
  int ranks = 1;
  // How many consecutive ranks form an inner group, a divisor of `ranks`; 0: as the schedule does by itself
  // (schedules.h). Ring and all-gather have no groups and take only 0.
  int within = 0;
  bool even = false;                         // reject lengths that give ranks unequal shares
  std::vector<int64_t> uneven_lengths = {};  // if not empty: contiguous parts of these lengths (queries and keys alike)
  // The pattern by which a layout that is dealt deals positions, so that calls with different patterns can share a
  // layout; none: `pattern`.
  std::optional<PatternSpec> balance_by = std::nullopt;
  // Whether a plan may save, for the backward, the keys and values that a rank held last. If not, they are sent again,
  // and the shapes of all saved tensors follow from those of q, k and v.
  bool keep_last = true;
  TermsPointer terms = {};  // for `auto`; other schedules do not depend on them

  std::string text() const;  // the canonical text that ranks compare, without `even`, which changes no plan
  friend bool operator==(const PlanRequest&, const PlanRequest&) = default;
};

// Return the layouts of queries and of keys. Those that are dealt come from the cache "layouts" (memory/caches.h);
// masks of tokens count as if nothing were masked, and adaptive maps as if they kept the blocks nearest to the
// diagonal. They depend on the lengths and the pattern, not on heads and batch rows beyond those that the pattern tells
// apart. If there are not as many queries as keys, keys are contiguous. Raise the errors of make_layout and
// make_pattern.
Layout query_layout(const PlanRequest& request);
Layout key_layout(const PlanRequest& request);

// Returns the query rows whose bits of masks a rank reads: those that it owns, by which the proof knows what is to be
// computed, and those that it computes where the schedule moves queries. Of a request with kAuto the first alone, so
// that `auto` takes no schedule that moves queries once these bits, and no others, are held. One rank has all. Depends
// on no mask, whose bits need not be read yet. Raises as validate does.
HeldBits needed_bits(const PlanRequest& request, int rank);

// Key/value rows of some batch rows and kv heads at the same global positions, or query rows of some query heads,
// stored as [batch][positions][heads]. The concatenation of the spans `positions` gives the block's rows 0, 1, 2, ...
struct RowBlock {
  Span batch;
  Span heads;
  std::vector<Span> positions;

  int64_t positions_count() const;
  int64_t rows() const { return batch.count * heads.count * positions_count(); }
  friend bool operator==(const RowBlock&, const RowBlock&) = default;
};

// A set of key/value rows: disjoint blocks, concatenated in storage. There is more than one if heads or batch rows need
// different positions.
struct RowSet {
  std::vector<RowBlock> blocks;

  int64_t rows() const;
  friend bool operator==(const RowSet&, const RowSet&) = default;
};

// Returns the row of `whole` where `part` begins if `part` is contiguous there, so that it can be sent without a copy;
// otherwise nullopt.
std::optional<int64_t> consecutive_rows(const RowSet& whole, const RowSet& part);

// The content of a buffer. A buffer is a few tensors with the same rows: K and V, or dK and dV; or, where queries
// travel to keys, what belongs to queries.
enum class BufferKind {
  kOwnKV,       // the caller's k and v, full from the start
  kKV,          // travelling keys and values, in the inputs' dtype
  kSavedKV,     // the keys and values that the rank held last in the forward, saved for the backward
  kGrad,        // travelling or waiting gradients dk and dv, in the accumulator's dtype
  kOwnGrad,     // this rank's dk and dv, which the backward returns
  kOwnQueries,  // the caller's q and, in the backward, dout, out and lse; full from the start
  kQueries,  // the same of other ranks: one block of all batch rows, whose heads read one kv head or all of their own
  kResults,  // forward: out and lse of queries over some of their keys; backward: dq. In the accumulator's dtype
  kOwnResults,  // those of this rank's queries, which the forward or the backward returns
};

struct Buffer {
  BufferKind kind = BufferKind::kKV;
  RowSet rows;  // all rows that it ever holds; one transfer fills a travelling block, once

  // Whether its content is moved and added up, not copied: what is sent or added elsewhere is not here any more.
  bool holds_sums() const {
    return kind == BufferKind::kGrad || kind == BufferKind::kOwnGrad || kind == BufferKind::kResults ||
           kind == BufferKind::kOwnResults;
  }
  // Whether its rows are those of keys, with kv heads, or those of queries, with query heads.
  bool of_keys() const { return kind < BufferKind::kOwnQueries; }
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

// Sends all tensors of a buffer to a peer, or receives them. A receive fills its buffer, so `rows` are all of the
// buffer's rows. A send moves all rows of a buffer that holds sums, but of keys, values and queries only those that are
// needed. The n-th send to a peer matches the peer's n-th receive from this rank.
struct Transfer {
  int peer = 0;
  int buffer = 0;
  RowSet rows;

  friend bool operator==(const Transfer&, const Transfer&) = default;
};

// One rectangle of (query rows, key rows), cut by a band and by a mask, for some batch rows and query heads. Query rows
// index this rank's q or the only block of a buffer of queries, key rows a block of a buffer. The positions are the
// global positions of these rows, and the band is over positions.
struct Tile {
  int buffer = 0;        // the buffer with the keys and values
  int block = 0;         // the index of the RowBlock in the buffer
  int grad_buffer = -1;  // backward: the buffer to which this tile's dK and dV are added; -1 in the forward
  int grad_block = 0;
  Span batch;
  Span heads;  // query heads, counted from the first one of `queries`
  Span query_rows;
  Span query_positions;  // as many as query_rows
  Span key_rows;
  Span key_positions;  // as many as key_rows
  Span grad_rows;      // backward: rows of the gradient's block, as many as key_rows
  Band band;           // a side that cuts nothing is unbounded
  int64_t mask =
      -1;            // the index of the plane of a mask (Program::masks) that hides pairs, by their positions; -1: none
  int queries = -1;  // the kQueries buffer with the query rows; -1: this rank's q

  friend bool operator==(const Tile&, const Tile&) = default;
};

// Ends the computation with a kQueries buffer: its results so far become the content of a kResults buffer with the same
// rows. No later tile has these queries.
struct Finish {
  int queries = 0;
  int results = 0;

  friend bool operator==(const Finish&, const Finish&) = default;
};

// dst += src. Both hold sums of one kind, and dst has all rows of src, which is not read again. Results of the forward
// are merged by their lse. The first addition to this rank's own results comes after the last tile of its own queries.
struct Add {
  int dst = 0;
  int src = 0;

  friend bool operator==(const Add&, const Add&) = default;
};

// One step of a rank. The executor starts all transfers, computes the tiles meanwhile (in order, merging into out and
// lse or adding to the gradient buffers), ends the queries that are to be finished, waits for the transfers, and then
// does the adds in order. So tiles neither read nor change the buffers that the step receives; adds may. Neither may
// change the buffers that the step sends; a sent sum belongs to its receiver. Both ends of a transfer are in steps of
// the same number.
struct Step {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  std::vector<int> zero;  // gradient buffers set to zero before the step's tiles
  std::vector<Tile> tiles;
  std::vector<Finish> finishes = {};
  std::vector<Add> adds;

  friend bool operator==(const Step&, const Step&) = default;
};

// An identity of an object that is unique in the process over time, as a key for data derived from the object. A copied
// or moved-to object has a new number. Numbers compare equal, because they are not part of an object's value.
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
// it uses. Kernels cache data derived from a program's tiles under its number, so change only copies of a program that
// has run.
struct Program {
  PlanRequest request;
  int rank = 0;
  std::vector<Span> query_spans;  // the positions that this rank owns, in storage order
  std::vector<Span> key_spans;
  std::vector<Buffer> buffers;
  std::vector<Step> forward;
  std::vector<Step> backward;
  MaskPlanes masks = {};  // to which tiles refer, with the bits that this rank needs (needed_bits)
  int saved = -1;         // the kSavedKV buffer, or -1: the backward needs only q, k, v, out, lse
  ObjectNumber number;

  int64_t query_count() const;  // positions in this rank's q
  bool moves_queries() const;   // whether there are buffers of queries and results: 2 and 3 are this rank's own
  friend bool operator==(const Program&, const Program&) = default;
};

// Validates a request (ranks, heads, lengths, pattern, layout). Raises Error(kPlan), whose message suggests valid
// values. Depends on the request alone, so all ranks raise the same error. make_program calls it.
void validate(const PlanRequest& request);

// Makes one rank's program. Raises Error(kPlan) if the request or `rank` is invalid. The time also depends on the needs
// of other ranks: each slice is compared with the ranks that hold its keys or queries, though in detail with only few
// of them (benchmarks/results/machine-c.md). The program's memory grows with this rank's steps and tiles. Thread safe,
// as are the other functions here.
Program make_program(const PlanRequest& request, int rank);
// Make the programs of all ranks, in rank order, as make_program does, but compute the needs only once. Used by the
// verifier and `annulus plan`.
void for_each_program(const PlanRequest& request, const std::function<void(Program)>& take);
std::vector<Program> make_programs(const PlanRequest& request);
// Makes a program for any sum of slices over request.shape instead of request.pattern. Ranks compare requests, not
// slices, so the caller must ensure that all ranks pass the same slices.
Program make_program(const PlanRequest& request, const Pattern& pattern, int rank);

// Makes the tiles of consecutive queries, which are rows 0, 1, ... of q, with keys at the positions `keys` in ascending
// order, which are the rows 0, 1, ... of a block with all batch rows and kv heads: block 0 of buffer 0. For code that
// keeps keys by itself (runtime/inference/kv_cache.h).
std::vector<Tile> make_tiles(const Pattern& pattern, const Span& queries, const std::vector<Span>& keys);

// Returns the pattern of a request from the cache "patterns" (memory/caches.h), which makes it if missing. Raises as
// make_pattern does. Thread safe.
std::shared_ptr<const Pattern> cached_pattern(const PlanRequest& request);

// Returns the layout of queries that is dealt for a request from the cache "layouts", as query_layout does without a
// copy.
std::shared_ptr<const Layout> cached_dealt_layout(const PlanRequest& request);

// Returns the request with kAuto resolved, the same on every rank (choice.h). Raises like validate, and Error(kPlan) if
// nothing fits the memory of the request's terms.
PlanRequest resolve_schedule(const PlanRequest& request);

}  // namespace annulus
