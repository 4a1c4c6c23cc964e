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
      const Span stored{s.at(rows.begin - first_row), rows.stride * s.stride, rows.count};
      return rows.last() < first_row + s.count && positions.begin == stored.begin && positions.count == stored.count &&
             (positions.count == 1 || positions.stride == stored.stride);
    }
    first_row += s.count;
  }
  return false;
}

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
      marks_(static_cast<size_t>(shape_.k_len)) {
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
  const auto is_own = [&](int number, BufferKind kind) {
    const Buffer* b = buffer(number);
    return b && b->kind == kind && b->rows == own;
  };
  if (!is_own(kOwnKVBuffer, BufferKind::kOwnKV)) fault("its first buffer is not its own keys and values");
  if (!is_own(kOwnGradBuffer, BufferKind::kOwnGrad)) fault("its second buffer is not its own keys' gradients");
  for (int number = 0; number < static_cast<int>(program_.buffers.size()); ++number) {
    const Buffer& b = *buffer(number);
    const std::string name = "buffer " + std::to_string(number);
    if ((b.kind == BufferKind::kOwnKV && number != kOwnKVBuffer) ||
        (b.kind == BufferKind::kOwnGrad && number != kOwnGradBuffer)) {
      fault(name + " is named its own rows, but is not what the caller hands in or gets back");
    }
    // Own rows have been checked above. They may be empty, since a rank may own no position.
    if (number == kOwnKVBuffer || number == kOwnGradBuffer) continue;
    if (const auto what = ill_formed(b.rows)) fault(name + *what);
  }
  const Buffer* saved = buffer(program_.saved);
  if (program_.saved != -1 && (!saved || saved->kind != BufferKind::kSavedKV)) {
    fault("what it keeps for the backward is not a buffer for saved keys and values");
  }
}

// Returns what is wrong with a buffer's rows. The executor relies on positions that ascend in storage, and on no row
// being stored twice.
std::optional<std::string> RankProof::ill_formed(const RowSet& rows) {
  for (const RowBlock& block : rows.blocks) {
    if (!within(block.batch, shape_.batch) || !within(block.heads, shape_.kv_heads)) {
      return " names batch rows or heads that do not exist";
    }
    int64_t next = 0;
    for (const Span& s : block.positions) {
      if (s.empty()) continue;
      if (!within(s, shape_.k_len)) return " names keys that do not exist";
      if (s.begin < next) return " does not store its keys in their order";
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
    states_[b].full = program_.buffers[b].kind == BufferKind::kOwnKV || saved || rows_[b] == 0;
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
  // A part of a buffer of keys and values may be sent, but of gradients the part left behind would be lost.
  if (send && !b->holds_gradient() ? !includes(b->rows, t.rows) : !(t.rows == b->rows)) {
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
    if (!b || !b->holds_gradient()) {
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

// A gradient that was sent, in this step or before, belongs to its receiver. What is added to it now would be lost, or
// would change data that is still being sent.
void RankProof::change_gradient(int number, const std::string& what) {
  if (!state(number).full) fault(what + " buffer " + std::to_string(number) + " before it is filled");
  if (state(number).left > 0) fault("changes buffer " + std::to_string(number) + " while it travels, or after it left");
}

void RankProof::compute(const Step& step, bool backward) {
  for (const Tile& tile : step.tiles) {
    ++proof_->tiles;
    if (!check_tile(tile, backward)) return;
    if (!state(tile.buffer).full) fault("a tile reads buffer " + std::to_string(tile.buffer) + " before it is filled");
    if (backward) change_gradient(tile.grad_buffer, "a tile adds to");
    const MaskPlane* const mask = tile.mask < 0 ? nullptr : &program_.masks[static_cast<size_t>(tile.mask)];
    computed_ =
        add(computed_, weights_.of(tile.batch, tile.heads, tile.query_positions, tile.key_positions, tile.band, mask));
  }
}

bool RankProof::check_tile(const Tile& tile, bool backward) {
  if (tile.mask >= static_cast<int64_t>(program_.masks.size())) {
    fault("a tile names a mask that the program does not have");
    return false;
  }
  const Buffer* keys = buffer(tile.buffer);
  if (!keys || keys->holds_gradient()) {
    fault("a tile reads keys from a buffer that holds none");
    return false;
  }
  if (!rows_are(tile.query_rows, tile.query_positions, program_.query_spans)) {
    fault("a tile takes query rows " + to_string(tile.query_rows) + " for queries " + to_string(tile.query_positions) +
          ", which are stored elsewhere");
    return false;
  }
  if (!holds(*keys, tile.block, tile, tile.key_rows)) {
    fault("a tile takes key rows " + to_string(tile.key_rows) + " for keys " + to_string(tile.key_positions) +
          ", batch rows or heads, which are stored elsewhere");
    return false;
  }
  if (!backward) return true;
  const Buffer* grad = buffer(tile.grad_buffer);
  if (!grad || !grad->holds_gradient()) {
    fault("a tile adds its gradients to a buffer that holds none");
    return false;
  }
  if (!holds(*grad, tile.grad_block, tile, tile.grad_rows)) {
    fault("a tile adds its gradients to rows that are not its keys'");
    return false;
  }
  return true;
}

// Whether the tile's keys, batch rows and heads are stored in these rows of this block of the buffer.
bool RankProof::holds(const Buffer& held_in, int number, const Tile& tile, const Span& rows) const {
  if (number < 0 || number >= static_cast<int>(held_in.rows.blocks.size())) return false;
  if (tile.batch.empty() || tile.heads.empty()) return false;
  const RowBlock& block = held_in.rows.blocks[static_cast<size_t>(number)];
  for (int64_t i = 0; i < tile.batch.count; i += lookup_step(tile.batch, block.batch)) {
    if (!block.batch.contains(tile.batch.at(i))) return false;
  }
  const int64_t group = shape_.heads / shape_.kv_heads;
  for (int64_t i = 0; i < tile.heads.count; i += lookup_step(tile.heads, block.heads)) {
    if (!block.heads.contains(floor_div(tile.heads.at(i), group))) return false;
  }
  return rows_are(rows, tile.key_positions, block.positions);
}

// Whether every row of `part` is one of `whole`. It counts the rows found, which is right because no row is in two
// blocks of `whole`.
bool RankProof::includes(const RowSet& whole, const RowSet& part) {
  if (whole == part) return true;
  for (const RowBlock& block : part.blocks) {
    for (const Span& s : block.positions) {
      if (!s.empty() && !within(s, shape_.k_len)) return false;
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
    if (!dst || !src || !dst->holds_gradient() || !src->holds_gradient()) {
      fault("adds buffers that hold no gradients");
      continue;
    }
    if (!includes(dst->rows, src->rows)) {
      fault("adds gradients of other rows");
      continue;
    }
    // The gradient would count as having left this buffer, and would never reach its owner.
    if (a.dst == a.src) fault("adds buffer " + std::to_string(a.src) + " to itself");
    if (!state(a.src).full) fault("adds buffer " + std::to_string(a.src) + " before it is filled");
    change_gradient(a.dst, "adds to");
    ++state(a.src).left;
  }
}

void RankProof::finish(bool backward) {
  if (computed_ != expected_) {
    fault("its tiles are not the pattern's pairs of its queries, each as often as it is counted");
  }
  if (!backward) {
    if (program_.saved >= 0 && !state(program_.saved).full) {
      fault("the keys and values to keep for the backward never arrive");
    }
    return;
  }
  for (int number = 0; number < static_cast<int>(program_.buffers.size()); ++number) {
    if (!buffer(number)->holds_gradient() || rows_[static_cast<size_t>(number)] == 0) continue;
    const auto [full, left] = state(number);
    const bool own = number == kOwnGradBuffer;
    if (own && !full) fault("the gradients of its keys and values are never set");
    if (full && left != (own ? 0 : 1)) {
      fault("the gradients in buffer " + std::to_string(number) + " are lost or counted twice: they leave it " +
            std::to_string(left) + " times instead of " + (own ? "0" : "1"));
    }
  }
}

}  // namespace annulus
