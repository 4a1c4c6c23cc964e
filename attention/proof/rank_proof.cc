// Follows one rank's program step by step and checks it; see rank_proof.h.
#include "attention/proof/rank_proof.h"

#include <algorithm>

#include "attention/plan/schedules.h"

namespace annulus {
namespace {

// Whether the span is not empty and lies within [0, length).
bool within(const Span& s, int64_t length) { return !s.empty() && s.stride >= 1 && s.begin >= 0 && s.last() < length; }

// Whether two short spans have a common member.
bool share_member(const Span& a, const Span& b) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (b.contains(a.at(i))) return true;
  }
  return false;
}

int64_t count_common(const Span& a, const Span& b) {
  int64_t n = 0;
  for (int64_t i = 0; i < a.count; ++i) n += b.contains(a.at(i));
  return n;
}

// Whether the storage rows `rows` of `spans`, which are stored one after the other, hold `positions`. All rows must lie
// in one span.
bool rows_are(const Span& rows, const Span& positions, const std::vector<Span>& spans) {
  if (rows.empty() || rows.begin < 0 || rows.stride < 1) return false;
  int64_t first_row = 0;
  for (const Span& s : spans) {
    if (rows.begin < first_row + s.count) {
      // Rows beyond the span could have a stride whose product with the span's does not fit.
      if (rows.last() >= first_row + s.count) return false;
      const Span stored{s.at(rows.begin - first_row), rows.stride * s.stride, rows.count};
      return positions.begin == stored.begin && positions.count == stored.count &&
             (positions.count == 1 || positions.stride == stored.stride);
    }
    first_row += s.count;
  }
  return false;
}

bool holds_gradients(const Buffer& b) { return b.kind == BufferKind::kGrad || b.kind == BufferKind::kOwnGrad; }

// What a fault calls the sums of a buffer.
std::string sums_of(const Buffer& b) { return holds_gradients(b) ? "gradients" : "results"; }

// The step between the members that must be looked up. If `held` has no gaps, it is enough to look up both ends.
int64_t lookup_step(const Span& members, const Span& held) {
  return held.stride == 1 ? std::max<int64_t>(1, members.count - 1) : 1;
}

}  // namespace

RankProof::RankProof(const Program& program, const Pattern& pattern, const Layout& queries, const Layout& keys,
                     PairWeights& weights)
    : program_(program),
      pattern_(pattern),
      shape_(program.request.shape),
      queries_(queries),
      keys_(keys),
      weights_(weights),
      marks_(static_cast<size_t>(std::max(shape_.q_len, shape_.k_len))) {
  for (const Buffer& b : program.buffers) rows_.push_back(b.rows.rows());
}

void RankProof::run(Proof& proof, size_t max_faults) {
  proof_ = &proof;
  max_faults_ = max_faults;
  place_ = "rank " + std::to_string(program_.rank) + ": ";
  check_own_rows();
  check_buffers();
  expect_pairs();
  if (faults_ > 0) return;
  for (const bool backward : {false, true}) follow(backward);
}

void RankProof::fault(const std::string& text) {
  ++faults_;
  if (proof_->faults.size() < max_faults_) proof_->faults.push_back(place_ + text);
}

const Buffer* RankProof::buffer(int number) const {
  const std::vector<Buffer>& all = program_.buffers;
  return number >= 0 && number < static_cast<int>(all.size()) ? &all[static_cast<size_t>(number)] : nullptr;
}

void RankProof::mark(const std::vector<Span>& positions, uint8_t value) {
  for (const Span& s : positions) {
    for (int64_t i = 0; i < s.count; ++i) marks_[static_cast<size_t>(s.at(i))] = value;
  }
}

// ---- What the program declares before its steps

// Callers cut their tensors by the layout, so the program must own exactly what the layout gives the rank.
void RankProof::check_own_rows() {
  const size_t r = static_cast<size_t>(program_.rank);
  if (program_.query_spans != queries_.spans[r]) fault("its queries are not those that the layout gives it");
  if (program_.key_spans != keys_.spans[r]) fault("its keys are not those that the layout gives it");
}

void RankProof::check_buffers() {
  const RowSet own{{{Span::range(0, shape_.batch), Span::range(0, shape_.kv_heads),
                     keys_.spans[static_cast<size_t>(program_.rank)]}}};
  const RowSet queries{{{Span::range(0, shape_.batch), Span::range(0, shape_.heads),
                         queries_.spans[static_cast<size_t>(program_.rank)]}}};
  const auto is_own = [&](int number, BufferKind kind, const RowSet& rows) {
    const Buffer* b = buffer(number);
    return b && b->kind == kind && b->rows == rows;
  };
  const bool moves = program_.moves_queries();
  if (!is_own(kOwnKVBuffer, BufferKind::kOwnKV, own)) fault("its first buffer is not its own keys and values");
  if (!is_own(kOwnGradBuffer, BufferKind::kOwnGrad, own)) fault("its second buffer is not its own keys' gradients");
  if (moves && !is_own(kOwnQueriesBuffer, BufferKind::kOwnQueries, queries)) {
    fault("its third buffer is not its own queries");
  }
  if (moves && !is_own(kOwnResultsBuffer, BufferKind::kOwnResults, queries)) {
    fault("its fourth buffer is not its own queries' results");
  }
  for (int number = 0; number < static_cast<int>(program_.buffers.size()); ++number) {
    const Buffer& b = *buffer(number);
    const std::string name = "buffer " + std::to_string(number);
    if ((b.kind == BufferKind::kOwnKV && number != kOwnKVBuffer) ||
        (b.kind == BufferKind::kOwnGrad && number != kOwnGradBuffer) ||
        (b.kind == BufferKind::kOwnQueries && number != kOwnQueriesBuffer) ||
        (b.kind == BufferKind::kOwnResults && number != kOwnResultsBuffer)) {
      fault(name + " is named its own rows, but is not what the caller hands in or gets back");
    }
    // Own rows have been checked above. They may be empty, since a rank may own no position.
    if (number == kOwnKVBuffer || number == kOwnGradBuffer) continue;
    if (moves && (number == kOwnQueriesBuffer || number == kOwnResultsBuffer)) continue;
    if (!b.of_keys() && !moves) fault(name + " is of queries, but the program has no buffers of its own queries");
    if (const auto what = ill_formed(b)) fault(name + *what);
  }
  const Buffer* saved = buffer(program_.saved);
  if (program_.saved != -1 && (!saved || saved->kind != BufferKind::kSavedKV)) {
    fault("what it keeps for the backward is not a buffer for saved keys and values");
  }
}

// Returns what is wrong with a buffer's rows. The executor relies on positions that ascend in storage, and on no row
// being stored twice.
std::optional<std::string> RankProof::ill_formed(const Buffer& b) {
  const RowSet& rows = b.rows;
  const int64_t heads = b.of_keys() ? shape_.kv_heads : shape_.heads, group = shape_.heads / shape_.kv_heads;
  if (b.kind == BufferKind::kQueries) {
    // One tensor of a kernel, in which query head h reads kv head h / group, counted from the first ones.
    const bool one = rows.blocks.size() == 1 && rows.blocks[0].batch == Span::range(0, shape_.batch);
    const Span own = one ? rows.blocks[0].heads : Span{};
    const bool whole = own.begin % group == 0 || own.begin / group == own.last() / group;
    if (!one || own.stride != 1 || !whole) return " is not one block of queries that a kernel can take";
  }
  for (const RowBlock& block : rows.blocks) {
    if (!within(block.batch, shape_.batch) || !within(block.heads, heads)) {
      return " names batch rows or heads that do not exist";
    }
    int64_t next = 0;
    for (const Span& s : block.positions) {
      if (s.empty()) continue;
      const std::string what = b.of_keys() ? "keys" : "queries";
      if (!within(s, length_of(b))) return " names " + what + " that do not exist";
      if (s.begin < next) return " does not store its " + what + " in their order";
      next = s.last() + 1;
    }
  }
  for (size_t i = 0; i < rows.blocks.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (share_rows(rows.blocks[i], rows.blocks[j])) return " stores a row twice";
    }
  }
  return std::nullopt;
}

bool RankProof::share_rows(const RowBlock& a, const RowBlock& b) {
  if (!share_member(a.batch, b.batch) || !share_member(a.heads, b.heads)) return false;
  mark(a.positions, 1);
  bool shared = false;
  for (const Span& s : b.positions) {
    for (int64_t i = 0; i < s.count && !shared; ++i) shared = marks_[static_cast<size_t>(s.at(i))] != 0;
  }
  mark(a.positions, 0);
  return shared;
}

// Computes from the pattern alone what the tiles of either direction must add up to.
void RankProof::expect_pairs() {
  const std::vector<Span>& owned = queries_.spans[static_cast<size_t>(program_.rank)];
  for (const Slice& s : pattern_.slices) {
    expected_ = add(expected_, weights_.of_owned(s, pattern_.masks, owned, &proof_->pairs));
  }
}

// ---- The steps, in the order in which the executor runs them

void RankProof::follow(bool backward) {
  states_.assign(program_.buffers.size(), {});
  for (size_t b = 0; b < states_.size(); ++b) {
    const bool saved = backward && static_cast<int>(b) == program_.saved;
    // A buffer without rows counts as full.
    const BufferKind kind = program_.buffers[b].kind;
    states_[b].full = kind == BufferKind::kOwnKV || kind == BufferKind::kOwnQueries ||
                      kind == BufferKind::kOwnResults || saved || rows_[b] == 0;
  }
  arriving_.assign(program_.buffers.size(), 0);
  computed_ = 0;
  const std::string direction = "rank " + std::to_string(program_.rank) + ", " + (backward ? "backward" : "forward");
  const int before = faults_;
  const std::vector<Step>& steps = backward ? program_.backward : program_.forward;
  for (size_t s = 0; s < steps.size(); ++s) {
    place_ = direction + " step " + std::to_string(s) + ": ";
    start_transfers(steps[s]);
    if (faults_ == before) zero(steps[s]);
    if (faults_ == before) compute(steps[s], backward);
    if (faults_ == before) end_queries(steps[s]);
    if (faults_ == before) finish_step(steps[s]);
    if (faults_ > before) return;
  }
  place_ = direction + ": ";
  finish(backward);
}

bool RankProof::check_transfer(const Transfer& t, bool send) {
  ++proof_->transfers;
  const Buffer* b = buffer(t.buffer);
  if (t.peer < 0 || t.peer >= program_.request.ranks || !b) {
    fault("a transfer names a rank or buffer that does not exist");
    return false;
  }
  // A part of a buffer of keys, values or queries may be sent, but of sums the part left behind would be lost.
  if (send && !b->holds_sums() ? !includes(b->rows, t.rows, length_of(*b)) : !(t.rows == b->rows)) {
    fault("a transfer moves other rows than its buffer " + std::to_string(t.buffer) + " holds");
    return false;
  }
  return true;
}

void RankProof::start_transfers(const Step& step) {
  for (const Transfer& t : step.receives) {
    if (!check_transfer(t, /*send=*/false)) continue;
    uint8_t& arriving = arriving_[static_cast<size_t>(t.buffer)];
    if (arriving) fault("two transfers arrive in buffer " + std::to_string(t.buffer));
    arriving = 1;
    if (state(t.buffer).full) {
      fault("buffer " + std::to_string(t.buffer) + " is overwritten by what rank " + std::to_string(t.peer) + " sends");
    }
  }
  for (const Transfer& t : step.sends) {
    if (!check_transfer(t, /*send=*/true)) continue;
    if (!state(t.buffer).full) fault("sends buffer " + std::to_string(t.buffer) + " before it is filled");
    ++state(t.buffer).left;
  }
}

void RankProof::zero(const Step& step) {
  for (const int number : step.zero) {
    const Buffer* b = buffer(number);
    if (!b || !holds_gradients(*b)) {
      fault("zeroes a buffer that holds no gradients");
      continue;
    }
    if (arriving_[static_cast<size_t>(number)]) {
      fault("changes buffer " + std::to_string(number) + " while it travels");
    }
    if (state(number).full && rows_[static_cast<size_t>(number)] > 0) {
      fault("throws away the gradients in buffer " + std::to_string(number));
    }
    state(number).full = true;
  }
}

// A sum that was sent, in this step or before, belongs to its receiver. What is added to it now would be lost, or
// would change data that is still being sent.
void RankProof::change_sum(int number, const std::string& what) {
  if (!state(number).full) fault(what + " buffer " + std::to_string(number) + " before it is filled");
  if (state(number).left > 0) fault("changes buffer " + std::to_string(number) + " while it travels, or after it left");
}

void RankProof::compute(const Step& step, bool backward) {
  for (const Tile& tile : step.tiles) {
    ++proof_->tiles;
    if (!check_tile(tile, backward)) return;
    if (!state(tile.buffer).full) fault("a tile reads buffer " + std::to_string(tile.buffer) + " before it is filled");
    if (backward) change_sum(tile.grad_buffer, "a tile adds to");
    const int queries = tile.queries >= 0 ? tile.queries : program_.moves_queries() ? kOwnQueriesBuffer : -1;
    if (queries >= 0) {
      State& of_queries = state(queries);
      if (!of_queries.full) fault("a tile reads queries in buffer " + std::to_string(queries) + " before they arrive");
      if (of_queries.ended) fault("a tile has queries of buffer " + std::to_string(queries) + ", which have ended");
      of_queries.computing = true;
    }
    const MaskPlane* const mask = tile.mask < 0 ? nullptr : &program_.masks[static_cast<size_t>(tile.mask)];
    computed_ = add(
        computed_, weights_.of(tile.batch, *heads_of(tile), tile.query_positions, tile.key_positions, tile.band, mask));
  }
}

// What tiles have computed with queries of other ranks becomes the content of buffers of results.
void RankProof::end_queries(const Step& step) {
  for (const Finish& f : step.finishes) {
    const Buffer *queries = buffer(f.queries), *results = buffer(f.results);
    if (!queries || !results || queries->kind != BufferKind::kQueries || results->kind != BufferKind::kResults) {
      fault("ends queries that are not of another rank, or takes a buffer for results that is not one");
      continue;
    }
    const std::string name = "buffer " + std::to_string(f.results);
    if (!(queries->rows == results->rows)) fault("the results in " + name + " are of other rows than their queries");
    if (!state(f.queries).full) fault("ends queries before they arrive");
    if (state(f.queries).ended) fault("ends the queries in buffer " + std::to_string(f.queries) + " twice");
    if (rows_[static_cast<size_t>(f.results)] > 0 && state(f.results).full) fault(name + " is overwritten by results");
    if (arriving_[static_cast<size_t>(f.results)]) fault("changes " + name + " while it travels");
    state(f.queries).computing = false;
    state(f.queries).ended = state(f.results).full = true;
  }
}

// The global query heads of a tile, or none if its queries do not have them.
std::optional<Span> RankProof::heads_of(const Tile& tile) const {
  if (tile.queries < 0) return tile.heads;
  const Span& held = program_.buffers[static_cast<size_t>(tile.queries)].rows.blocks[0].heads;
  if (!within(tile.heads, held.count)) return std::nullopt;
  return Span{held.begin + tile.heads.begin, tile.heads.stride, tile.heads.count};
}

bool RankProof::check_tile(const Tile& tile, bool backward) {
  if (tile.mask >= static_cast<int64_t>(program_.masks.size())) {
    fault("a tile names a mask that the program does not have");
    return false;
  }
  const Buffer* keys = buffer(tile.buffer);
  if (!keys || keys->holds_sums() || !keys->of_keys()) {
    fault("a tile reads keys from a buffer that holds none");
    return false;
  }
  const Buffer* queries = buffer(tile.queries);
  if (tile.queries >= 0 && (!queries || queries->kind != BufferKind::kQueries)) {
    fault("a tile reads queries from a buffer that holds none");
    return false;
  }
  const std::optional<Span> heads = heads_of(tile);
  if (!heads) {
    fault("a tile names heads " + to_string(tile.heads) + ", which its queries do not have");
    return false;
  }
  if (!rows_are(tile.query_rows, tile.query_positions,
                tile.queries < 0 ? program_.query_spans : queries->rows.blocks[0].positions)) {
    fault("a tile takes query rows " + to_string(tile.query_rows) + " for queries " + to_string(tile.query_positions) +
          ", which are stored elsewhere");
    return false;
  }
  if (!holds(*keys, tile.block, tile, *heads, tile.key_rows)) {
    fault("a tile takes key rows " + to_string(tile.key_rows) + " for keys " + to_string(tile.key_positions) +
          ", batch rows or heads, which are stored elsewhere");
    return false;
  }
  if (!backward) return true;
  const Buffer* grad = buffer(tile.grad_buffer);
  if (!grad || !holds_gradients(*grad)) {
    fault("a tile adds its gradients to a buffer that holds none");
    return false;
  }
  if (!holds(*grad, tile.grad_block, tile, *heads, tile.grad_rows)) {
    fault("a tile adds its gradients to rows that are not its keys'");
    return false;
  }
  return true;
}

// Whether the tile's keys, batch rows and heads are stored in these rows of this block of the buffer.
bool RankProof::holds(const Buffer& held_in, int number, const Tile& tile, const Span& heads, const Span& rows) const {
  if (number < 0 || number >= static_cast<int>(held_in.rows.blocks.size())) return false;
  if (tile.batch.empty() || tile.heads.empty()) return false;
  const RowBlock& block = held_in.rows.blocks[static_cast<size_t>(number)];
  for (int64_t i = 0; i < tile.batch.count; i += lookup_step(tile.batch, block.batch)) {
    if (!block.batch.contains(tile.batch.at(i))) return false;
  }
  const int64_t group = shape_.heads / shape_.kv_heads;
  for (int64_t i = 0; i < heads.count; i += lookup_step(heads, block.heads)) {
    if (!block.heads.contains(floor_div(heads.at(i), group))) return false;
  }
  return rows_are(rows, tile.key_positions, block.positions);
}

// Whether every row of `part` is one of `whole`. It counts the rows found, which is right because no row is in two
// blocks of `whole`.
bool RankProof::includes(const RowSet& whole, const RowSet& part, int64_t length) {
  if (whole == part) return true;
  for (const RowBlock& block : part.blocks) {
    for (const Span& s : block.positions) {
      if (!s.empty() && !within(s, length)) return false;
    }
  }
  int64_t found = 0;
  for (const RowBlock& held : whole.blocks) {
    mark(held.positions, 1);
    for (const RowBlock& wanted : part.blocks) {
      const int64_t cells = count_common(wanted.batch, held.batch) * count_common(wanted.heads, held.heads);
      if (cells == 0) continue;
      for (const Span& s : wanted.positions) {
        for (int64_t i = 0; i < s.count; ++i) found += cells * marks_[static_cast<size_t>(s.at(i))];
      }
    }
    mark(held.positions, 0);
  }
  return found == part.rows();
}

// The transfers of the step have arrived, and then its additions run in their order.
void RankProof::finish_step(const Step& step) {
  for (const Transfer& t : step.receives) {
    state(t.buffer).full = true;
    arriving_[static_cast<size_t>(t.buffer)] = 0;
  }
  for (const Add& a : step.adds) {
    const Buffer *dst = buffer(a.dst), *src = buffer(a.src);
    if (!dst || !src || !dst->holds_sums() || !src->holds_sums() || dst->of_keys() != src->of_keys()) {
      fault("adds buffers that hold no gradients or results, or one to the other");
      continue;
    }
    if (!includes(dst->rows, src->rows, length_of(*dst))) {
      fault("adds " + sums_of(*src) + " of other rows");
      continue;
    }
    if (a.dst == kOwnResultsBuffer && program_.moves_queries()) state(kOwnQueriesBuffer).ended = true;
    // The sum would count as having left this buffer, and would never reach its owner.
    if (a.dst == a.src) fault("adds buffer " + std::to_string(a.src) + " to itself");
    if (!state(a.src).full) fault("adds buffer " + std::to_string(a.src) + " before it is filled");
    change_sum(a.dst, "adds to");
    ++state(a.src).left;
  }
}

void RankProof::finish(bool backward) {
  if (!program_.moves_queries() && computed_ != expected_) {
    fault("its tiles are not the pattern's pairs of its queries, each as often as it is counted");
  }
  proof_->computed[backward] = add(proof_->computed[backward], computed_);
  proof_->expected = backward ? proof_->expected : add(proof_->expected, expected_);
  if (!backward && program_.saved >= 0 && !state(program_.saved).full) {
    fault("the keys and values to keep for the backward never arrive");
  }
  for (int number = 0; number < static_cast<int>(program_.buffers.size()); ++number) {
    const Buffer& b = *buffer(number);
    const State& now = state(number);
    const std::string name = "buffer " + std::to_string(number);
    if (b.kind == BufferKind::kQueries && now.computing) {
      fault("what is computed with the queries in " + name + " is lost: they are not ended");
    }
    if (!b.holds_sums() || rows_[static_cast<size_t>(number)] == 0) continue;
    if (!backward && holds_gradients(b)) continue;
    const bool own = number == kOwnGradBuffer || b.kind == BufferKind::kOwnResults;
    if (own && !now.full) fault("the gradients of its keys and values are never set");
    if (now.full && now.left != (own ? 0 : 1)) {
      fault("the " + sums_of(b) + " in " + name + " are lost or counted twice: they leave it " +
            std::to_string(now.left) + " times instead of " + (own ? "0" : "1"));
    }
  }
}

}  // namespace annulus
