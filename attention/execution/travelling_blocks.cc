// Allocates, copies and frees blocks; see travelling_blocks.h.
#include "attention/execution/travelling_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/tiles/tile_views.h"
#include "memory/releasable.h"
#include "memory/upload.h"

namespace annulus {
namespace {

// The part of a block's tensor with the given global batch rows and kv heads, which must be among the block's.
at::Tensor part_of(const at::Tensor& tensor, const KeyBlock& block, const Span& batch, const Span& heads) {
  const auto take = [](const at::Tensor& t, int64_t dim, const Span& held, const Span& wanted) {
    if (held == wanted) return t;
    const int64_t step = wanted.count > 1 ? wanted.stride / held.stride : 1;
    return t.slice(dim, held.index_of(wanted.begin), held.index_of(wanted.last()) + 1, step);
  };
  return take(take(tensor, 0, block.batch, batch), 2, block.heads, heads);
}

// For the positions that two blocks have in common, their row numbers in each. Both blocks store positions in the same
// order.
struct CommonRows {
  std::vector<int64_t> a, b;
};
CommonRows common_positions(const std::vector<Span>& a, const std::vector<Span>& b) {
  CommonRows rows;
  int64_t row_a = 0, row_b = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Span both = intersect(a[i], b[j]);
    for (int64_t n = 0; n < both.count; ++n) {
      rows.a.push_back(row_a + a[i].index_of(both.at(n)));
      rows.b.push_back(row_b + b[j].index_of(both.at(n)));
    }
    if (a[i].last() <= b[j].last()) {
      row_a += a[i++].count;
    } else {
      row_b += b[j++].count;
    }
  }
  return rows;
}

at::Tensor index_of(const std::vector<int64_t>& rows, const at::Tensor& like) {
  return upload(at::tensor(rows, at::kLong), like.device());
}
bool consecutive(const std::vector<int64_t>& rows) {
  return rows.back() - rows.front() + 1 == static_cast<int64_t>(rows.size());
}

}  // namespace

void transfer_rows(const TensorPair& dst, const RowSet& dst_rows, const TensorPair& src, const RowSet& src_rows,
                   bool add) {
  if (dst_rows == src_rows) {
    for (const auto& [to, from] : {std::pair{dst.k, src.k}, std::pair{dst.v, src.v}})
      add ? to.add_(from) : to.copy_(from);
    return;
  }
  for (size_t d = 0; d < dst_rows.blocks.size(); ++d) {
    for (size_t s = 0; s < src_rows.blocks.size(); ++s) {
      const RowBlock &to_block = dst_rows.blocks[d], &from_block = src_rows.blocks[s];
      const Span batch = intersect(to_block.batch, from_block.batch),
                 heads = intersect(to_block.heads, from_block.heads);
      if (batch.empty() || heads.empty()) continue;
      const CommonRows rows = common_positions(to_block.positions, from_block.positions);
      if (rows.a.empty()) continue;
      const KeyBlock to = key_block(dst.k, dst.v, dst_rows, static_cast<int>(d));
      const KeyBlock from = key_block(src.k, src.v, src_rows, static_cast<int>(s));
      const at::Tensor to_index = consecutive(rows.a) ? at::Tensor() : index_of(rows.a, to.k);
      const at::Tensor from_index = consecutive(rows.b) ? at::Tensor() : index_of(rows.b, from.k);
      const int64_t n = static_cast<int64_t>(rows.a.size());
      for (const bool values : {false, true}) {
        const at::Tensor t = part_of(values ? to.v : to.k, to, batch, heads);
        const at::Tensor f = part_of(values ? from.v : from.k, from, batch, heads);
        const at::Tensor part = from_index.defined() ? f.index_select(1, from_index) : f.narrow(1, rows.b[0], n);
        if (to_index.defined()) {
          add ? t.index_add_(1, to_index, part) : t.index_copy_(1, to_index, part);
        } else {
          const at::Tensor target = t.narrow(1, rows.a[0], n);
          add ? target.add_(part) : target.copy_(part);
        }
      }
    }
  }
}

TravellingBlocks::Block::Block(TensorPair p, bool gradients, std::shared_ptr<Held> h)
    : pair(std::move(p)), which(gradients ? 1 : 0), held(std::move(h)) {
  held->now[which] += pair.k.numel() + pair.v.numel();
  held->peak[which] = std::max(held->peak[which], held->now[which]);
}
TravellingBlocks::Block::~Block() { held->now[which] -= pair.k.numel() + pair.v.numel(); }

TravellingBlocks::TravellingBlocks(const Program& program, const std::vector<Step>& steps, const at::Tensor& k,
                                   Communicator& comm)
    : program_(program),
      storage_(storage_of(program, steps)),
      successors_(storage_.successors()),
      ending_(steps.size()),
      kv_options_(k.options()),
      grad_options_(k.options().dtype(accumulator_type(k.scalar_type()))),
      head_dim_(k.size(3)),
      blocks_(storage_.buffers().size()),
      next_copy_(program.buffers.size()),
      comm_(comm),
      places_(blocks_.size(), Place::kOrdinary) {
  const bool forward = &steps == &program.forward;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const Lifetime& life = storage_.buffers()[b].life;
    const bool returned = b < program.buffers.size() && (program.buffers[b].kind == BufferKind::kOwnGrad ||
                                                         (forward && static_cast<int>(b) == program.saved));
    if (!returned && !life.empty()) ending_[static_cast<size_t>(life.last)].push_back(b);
  }
  place(steps);
}

void TravellingBlocks::place(const std::vector<Step>& steps) {
  bool lends = false;
  for (int rank = 0; rank < comm_.size() && !lends; ++rank) lends = rank != comm_.rank() && comm_.lends_to(rank);
  if (!lends) return;
  size_t copy = next_copy_;
  for (const Step& step : steps) {
    for (const Transfer& t : step.receives) {
      if (comm_.lends_to(t.peer)) places_[static_cast<size_t>(t.buffer)] = Place::kBorrowed;
    }
    for (const Transfer& t : step.sends) {
      const size_t buffer = static_cast<size_t>(t.buffer);
      const size_t sent = consecutive_rows(program_.buffers[buffer].rows, t.rows) ? buffer : copy++;
      if (comm_.lends_to(t.peer) && places_[sent] == Place::kOrdinary) places_[sent] = Place::kLendable;
    }
  }
}

void TravellingBlocks::put(int buffer, TensorPair pair) {
  const size_t number = static_cast<size_t>(buffer);
  blocks_[number] = std::make_unique<Block>(std::move(pair), is_gradient(number), held_);
}

TensorPair TravellingBlocks::allocate(int64_t rows, bool gradients, Place place) {
  const std::vector<int64_t> shape{rows, head_dim_};
  const at::TensorOptions& options = gradients ? grad_options_ : kv_options_;
  const auto tensor = [&] {
    if (place == Place::kLendable) return comm_.lendable(shape, options);
    return place == Place::kBorrowed ? tensor_without_memory(shape, options) : at::empty(shape, options);
  };
  return {tensor(), tensor()};
}

TensorPair& TravellingBlocks::tensors_of(size_t number) {
  std::unique_ptr<Block>& block = blocks_[number];
  if (!block) {
    const bool gradients = is_gradient(number);
    block = std::make_unique<Block>(allocate(storage_.buffers()[number].size / 2, gradients, places_[number]),
                                    gradients, held_);
  }
  return block->pair;
}

TensorPair TravellingBlocks::to_send(const Transfer& send) {
  const RowSet& stored = program_.buffers[static_cast<size_t>(send.buffer)].rows;
  const std::optional<int64_t> first = consecutive_rows(stored, send.rows);
  if (!first) {
    const TensorPair& copy = tensors_of(next_copy_++);
    transfer_rows(copy, send.rows, get(send.buffer), stored, /*add=*/false);
    return copy;
  }
  const TensorPair& whole = get(send.buffer);
  const int64_t rows = send.rows.rows();
  const TensorPair part{whole.k.narrow(0, *first, rows), whole.v.narrow(0, *first, rows)};
  if (send.buffer != kOwnKVBuffer || !comm_.lends_to(send.peer)) return part;
  if (!own_copy_.k.defined() || own_copy_rows_ != send.rows) {  // several ranks may be sent the same rows
    own_copy_ = allocate(rows, /*gradients=*/false, Place::kLendable);
    own_copy_rows_ = send.rows;
    own_copy_.k.copy_(part.k);
    own_copy_.v.copy_(part.v);
  }
  return own_copy_;
}

void TravellingBlocks::end_step(int step) {
  for (const size_t number : ending_[static_cast<size_t>(step)]) {
    std::unique_ptr<Block> block = std::move(blocks_[number]);
    const int successor = successors_[number];
    if (successor < 0 || places_[number] != Place::kOrdinary ||
        places_[static_cast<size_t>(successor)] != Place::kOrdinary) {
      continue;
    }
    blocks_[static_cast<size_t>(successor)] = std::move(block);
  }
}

}  // namespace annulus
