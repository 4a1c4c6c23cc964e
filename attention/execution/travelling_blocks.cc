// Allocates, copies and frees blocks; see travelling_blocks.h.
#include "attention/execution/travelling_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/tiles/merge.h"
#include "attention/tiles/tile_views.h"
#include "memory/pool/pool_tensor.h"
#include "memory/releasable.h"
#include "memory/upload.h"

namespace annulus {
namespace {

// The part [batch, positions, heads, width] of a tensor of these blocks that is in block `number` and has the given
// batch rows and heads, which must be among the block's.
at::Tensor part_of(const at::Tensor& flat, const RowSet& rows, size_t number, const Span& batch, const Span& heads) {
  const RowBlock& block = rows.blocks[number];
  int64_t first = 0;
  for (size_t i = 0; i < number; ++i) first += rows.blocks[i].rows();
  const at::Tensor whole = flat.narrow(0, first, block.rows())
                               .view({block.batch.count, block.positions_count(), block.heads.count, flat.size(1)});
  const auto take = [](const at::Tensor& t, int64_t dim, const Span& held, const Span& wanted) {
    if (held == wanted) return t;
    const int64_t step = wanted.count > 1 ? wanted.stride / held.stride : 1;
    return t.slice(dim, held.index_of(wanted.begin), held.index_of(wanted.last()) + 1, step);
  };
  return take(take(whole, 0, block.batch, batch), 2, block.heads, heads);
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

void transfer_rows(const BlockTensors& dst, const RowSet& dst_rows, const BlockTensors& src, const RowSet& src_rows,
                   Joining joining) {
  const bool add = joining == Joining::kAdd;
  if (dst_rows == src_rows && joining != Joining::kMerge) {
    for (size_t t = 0; t < dst.size(); ++t) add ? dst[t].add_(src[t]) : dst[t].copy_(src[t]);
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
      const at::Tensor to_index = consecutive(rows.a) ? at::Tensor() : index_of(rows.a, dst[0]);
      const at::Tensor from_index = consecutive(rows.b) ? at::Tensor() : index_of(rows.b, src[0]);
      const int64_t n = static_cast<int64_t>(rows.a.size());
      const auto to = [&](size_t t) { return part_of(dst[t], dst_rows, d, batch, heads); };
      const auto from = [&](size_t t) {
        const at::Tensor part = part_of(src[t], src_rows, s, batch, heads);
        return from_index.defined() ? part.index_select(1, from_index) : part.narrow(1, rows.b[0], n);
      };
      // [b, positions, heads, ..] as [b, heads, positions, ..]
      const auto by_head = [](const at::Tensor& t) { return t.transpose(1, 2); };
      if (joining == Joining::kMerge) {
        const auto target = [&](size_t t) { return to_index.defined() ? to(t) : to(t).narrow(1, rows.a[0], n); };
        merge_partial(by_head(target(0)), by_head(target(1)).squeeze(3), by_head(from(0)), by_head(from(1)).squeeze(3),
                      to_index);
        continue;
      }
      for (size_t t = 0; t < dst.size(); ++t) {
        if (to_index.defined()) {
          add ? to(t).index_add_(1, to_index, from(t)) : to(t).index_copy_(1, to_index, from(t));
        } else {
          const at::Tensor target = to(t).narrow(1, rows.a[0], n);
          add ? target.add_(from(t)) : target.copy_(from(t));
        }
      }
    }
  }
}

bool lends_saved(const Program& program, const Communicator& comm) {
  for (const Step& step : program.backward) {
    for (const Transfer& t : step.sends) {
      if (t.buffer == program.saved && comm.lends_to(t.peer)) return true;
    }
  }
  return false;
}

TravellingBlocks::Block::Block(BlockTensors t, size_t of, std::shared_ptr<Held> h)
    : tensors(std::move(t)), which(of), held(std::move(h)) {
  held->now[which] += elements();
  held->peak[which] = std::max(held->peak[which], held->now[which]);
}
TravellingBlocks::Block::~Block() { held->now[which] -= elements(); }

int64_t TravellingBlocks::Block::elements() const {
  int64_t sum = 0;
  for (const at::Tensor& t : tensors) sum += t.numel();
  return sum;
}

TravellingBlocks::TravellingBlocks(const Program& program, const std::vector<Step>& steps, const at::Tensor& k,
                                   Communicator& comm)
    : program_(program),
      backward_(&steps == &program.backward),
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
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const Lifetime& life = storage_.buffers()[b].life;
    const bool returned = b < program.buffers.size() && (program.buffers[b].kind == BufferKind::kOwnGrad ||
                                                         (!backward_ && static_cast<int>(b) == program.saved));
    if (!returned && !life.empty()) ending_[static_cast<size_t>(life.last)].push_back(b);
  }
  for (const Step& step : steps) {
    for (const Transfer& t : step.sends) {
      const Buffer& buffer = program.buffers[static_cast<size_t>(t.buffer)];
      if (!consecutive_rows(buffer.rows, t.rows)) copied_.push_back(buffer.kind);
    }
  }
  place(steps);
}

BufferKind TravellingBlocks::kind_of(size_t number) const {
  const size_t buffers = program_.buffers.size();
  return number < buffers ? program_.buffers[number].kind : copied_[number - buffers];
}

size_t TravellingBlocks::which_of(size_t number) const {
  const BufferKind kind = kind_of(number);
  if (number < program_.buffers.size() && (kind == BufferKind::kOwnQueries || kind == BufferKind::kOwnResults)) {
    return kGiven;
  }
  if (kind < BufferKind::kOwnQueries) return kind == BufferKind::kGrad || kind == BufferKind::kOwnGrad ? 1 : 0;
  return kind == BufferKind::kResults ? 3 : 2;
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

void TravellingBlocks::put(int buffer, BlockTensors tensors) {
  const size_t number = static_cast<size_t>(buffer);
  blocks_[number] = std::make_unique<Block>(std::move(tensors), which_of(number), held_);
}

void TravellingBlocks::fill(int buffer, BlockTensors tensors) {
  if (places_[static_cast<size_t>(buffer)] == Place::kOrdinary) return put(buffer, std::move(tensors));
  const BlockTensors& to = get(buffer);
  for (size_t t = 0; t < to.size(); ++t) to[t].copy_(tensors[t]);
}

BlockTensors TravellingBlocks::allocate(int64_t rows, BufferKind kind, Place place) {
  const auto tensor = [&](int64_t width, const at::TensorOptions& options) {
    const std::vector<int64_t> shape{rows, width};
    if (place == Place::kLendable) return comm_.lendable(shape, options);
    constexpr PoolPurpose kPurpose = PoolPurpose::kTravelling;
    if (place == Place::kOrdinary) return pool_tensor(shape, options, kPurpose);
    return tensor_without_memory(shape, options, pool_allocator(kPurpose, options.device()));
  };
  const RowContent content = row_content(kind, backward_);
  BlockTensors tensors;
  for (int64_t i = 0; i < content.vectors; ++i) tensors.push_back(tensor(head_dim_, kv_options_));
  for (int64_t i = 0; i < content.wide_vectors; ++i) tensors.push_back(tensor(head_dim_, grad_options_));
  for (int64_t i = 0; i < content.wide_elements; ++i) tensors.push_back(tensor(1, grad_options_));
  return tensors;
}

BlockTensors& TravellingBlocks::tensors_of(size_t number) {
  std::unique_ptr<Block>& block = blocks_[number];
  if (!block) {
    const BufferKind kind = kind_of(number);
    const int64_t rows = storage_.buffers()[number].size / (kind < BufferKind::kOwnQueries ? 2 : 1);
    block = std::make_unique<Block>(allocate(rows, kind, places_[number]), which_of(number), held_);
  }
  return block->tensors;
}

BlockTensors TravellingBlocks::to_send(const Transfer& send) {
  const Buffer& buffer = program_.buffers[static_cast<size_t>(send.buffer)];
  const std::optional<int64_t> first = consecutive_rows(buffer.rows, send.rows);
  if (!first) {
    const BlockTensors& copy = tensors_of(next_copy_++);
    transfer_rows(copy, send.rows, get(send.buffer), buffer.rows, Joining::kCopy);
    return copy;
  }
  BlockTensors part;
  for (const at::Tensor& whole : get(send.buffer)) part.push_back(whole.narrow(0, *first, send.rows.rows()));
  const bool callers = buffer.kind == BufferKind::kOwnKV || buffer.kind == BufferKind::kOwnQueries;
  if (!callers || !comm_.lends_to(send.peer)) return part;
  OwnCopy& copy = own_copies_[send.buffer];
  if (copy.tensors.empty() || copy.rows != send.rows) {  // several ranks may be sent the same rows
    copy = {allocate(send.rows.rows(), buffer.kind, Place::kLendable), send.rows};
    for (size_t t = 0; t < part.size(); ++t) copy.tensors[t].copy_(part[t]);
  }
  return copy.tensors;
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
