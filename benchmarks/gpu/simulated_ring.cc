// Implements simulated_ring.h.
#include "benchmarks/gpu/simulated_ring.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "attention/plan/schedules.h"
#include "attention/plan/traffic.h"
#include "attention/tiles/tile_views.h"
#include "common/error.h"

namespace annulus {
namespace {

struct RowPair {
  at::Tensor k, v;  // or dk and dv: [rows of a RowSet, D]
};

at::Tensor take(const at::Tensor& whole, int64_t dim, const Span& span) {
  return whole.slice(dim, span.begin, span.last() + 1, span.stride);
}

at::Tensor rows_at(const at::Tensor& whole, int64_t dim, const std::vector<Span>& spans) {
  std::vector<at::Tensor> parts = {whole.slice(dim, 0, 0)};
  for (const Span& span : spans) parts.push_back(take(whole, dim, span));
  return at::cat(parts, dim);
}

void put_rows(const at::Tensor& whole, int64_t dim, const std::vector<Span>& spans, const at::Tensor& part) {
  int64_t row = 0;
  for (const Span& span : spans) {
    take(whole, dim, span).copy_(part.slice(dim, row, row + span.count));
    row += span.count;
  }
}

// The rows of a set, taken from a whole tensor [B, S, Hk, D] and stored as buffers store them.
at::Tensor rows_of_set(const at::Tensor& whole, const RowSet& set) {
  std::vector<at::Tensor> parts = {at::empty({0, whole.size(3)}, whole.options())};
  for (const RowBlock& block : set.blocks) {
    parts.push_back(
        rows_at(take(take(whole, 0, block.batch), 2, block.heads), 1, block.positions).reshape({-1, whole.size(3)}));
  }
  return at::cat(parts);
}

// The index in `whole` of each row of `part`. Raises Error(kInternal) if `whole` lacks one of them.
std::vector<int64_t> places(const RowSet& whole, const RowSet& part) {
  std::vector<int64_t> rows;
  for (const RowBlock& p : part.blocks) {
    for (int64_t b = 0; b < p.batch.count; ++b) {
      for (const Span& span : p.positions) {
        for (int64_t n = 0; n < span.count; ++n) {
          for (int64_t h = 0; h < p.heads.count; ++h) {
            int64_t first = 0;
            for (const RowBlock& w : whole.blocks) {
              int64_t position = 0;
              const Span* holds = nullptr;
              for (const Span& s : w.positions) {
                if (s.contains(span.at(n))) {
                  holds = &s;
                  break;
                }
                position += s.count;
              }
              if (holds && w.batch.contains(p.batch.at(b)) && w.heads.contains(p.heads.at(h))) {
                rows.push_back(
                    first +
                    (w.batch.index_of(p.batch.at(b)) * w.positions_count() + position + holds->index_of(span.at(n))) *
                        w.heads.count +
                    w.heads.index_of(p.heads.at(h)));
                break;
              }
              first += w.rows();
            }
          }
        }
      }
    }
  }
  if (static_cast<int64_t>(rows.size()) != part.rows()) {
    throw Error(ErrorKind::kInternal, "bench", "a plan adds gradients of rows that the sum's buffer does not hold");
  }
  return rows;
}

bool same_block(const Tile& a, const Tile& b) {
  return a.buffer == b.buffer && a.block == b.block && a.grad_buffer == b.grad_buffer && a.grad_block == b.grad_block;
}

}  // namespace

struct SimulatedRing::Rank {
  Program program;
  KernelKind kernel_kind;
  KernelCall call;
  at::Tensor q, dout;              // this rank's rows
  at::Tensor out, lse, dq;         // results
  std::vector<RowPair> held;       // by buffer: keys and values always, gradients during their lifetime
  std::vector<Lifetime> lives;     // of the buffers in the backward
  std::unique_ptr<Kernel> kernel;  // exists while a direction runs
  // For each addition dst += src of each step: the indices in dst of the rows of src, unless these are consecutive
  // there.
  std::vector<std::vector<at::Tensor>> places_of_adds;
  at::TensorOptions grad_options;
  int64_t head_dim = 0;

  const RowSet& rows(int buffer) const { return program.buffers[static_cast<size_t>(buffer)].rows; }
  RowPair& pair(int buffer) { return held[static_cast<size_t>(buffer)]; }

  // The storage of a gradient buffer, allocated at its first use.
  RowPair& gradients(int buffer) {
    RowPair& p = pair(buffer);
    if (!p.k.defined()) {
      const std::vector<int64_t> sizes = {rows(buffer).rows(), head_dim};
      p = {at::empty(sizes, grad_options), at::empty(sizes, grad_options)};
    }
    return p;
  }
  KeyBlock block(int buffer, int number) { return key_block(pair(buffer).k, pair(buffer).v, rows(buffer), number); }

  // The (gradient buffer, block) pairs that are to be zero but have not been written yet, as in the executor, which
  // lets kernels set the first gradients instead of adding them.
  std::set<std::pair<int, int>> fresh;
  KeyBlock grads(int buffer, int number) {
    KeyBlock grads = block(buffer, number);
    grads.fresh = fresh.erase({buffer, number}) > 0;
    return grads;
  }

  template <typename Compute>
  void compute_tiles(const Step& step, Compute compute) {
    const std::span<const Tile> tiles = step.tiles;
    for (size_t i = 0; i < tiles.size();) {
      size_t past = i + 1;
      while (past < tiles.size() && same_block(tiles[past], tiles[i])) ++past;
      compute(tiles.subspan(i, past - i));
      i = past;
    }
  }

  void add(size_t step, size_t number) {
    const Add& a = program.backward[step].adds[number];
    RowPair &dst = gradients(a.dst), &src = gradients(a.src);
    for (const auto& [to, from] : {std::pair{dst.k, src.k}, std::pair{dst.v, src.v}}) {
      if (const auto first = consecutive_rows(rows(a.dst), rows(a.src))) {
        to.narrow(0, *first, from.size(0)).add_(from);
      } else {
        at::Tensor(to).index_add_(0, places_of_adds[step][number], from);
      }
    }
  }
};

SimulatedRing::~SimulatedRing() = default;

SimulatedRing::SimulatedRing(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& dout, KernelKind kernel) {
  const AttentionShape& shape = request.shape;
  const auto fits = [&](const at::Tensor& t, int64_t rows, int64_t heads) {
    return t.dim() == 4 && t.size(0) == shape.batch && t.size(1) == rows && t.size(2) == heads &&
           t.size(3) == q.size(3);
  };
  if (!fits(q, shape.q_len, shape.heads) || !fits(dout, shape.q_len, shape.heads) ||
      !fits(k, shape.k_len, shape.kv_heads) || !fits(v, shape.k_len, shape.kv_heads)) {
    throw Error(
        ErrorKind::kPlan, "bench",
        "a simulated ring expects whole tensors of the plan's shape: q and dout [B,Sq,H,D], k and v [B,Sk,Hk,D]");
  }
  // The same rows are sent to many ranks, so they are copied once.
  std::vector<std::pair<RowSet, RowPair>> taken;
  const auto keys_and_values = [&](const RowSet& rows) {
    const auto same = std::find_if(taken.begin(), taken.end(), [&](const auto& entry) { return entry.first == rows; });
    if (same != taken.end()) return same->second;
    return taken.emplace_back(rows, RowPair{rows_of_set(k, rows), rows_of_set(v, rows)}).second;
  };
  for (Program& program : make_programs(request)) {
    auto rank = std::make_unique<Rank>();
    rank->kernel_kind = kernel;
    rank->call = {1 / std::sqrt(static_cast<double>(q.size(3))), shape.heads / shape.kv_heads, {}};
    rank->q = rows_at(q, 1, program.query_spans);
    rank->dout = rows_at(dout, 1, program.query_spans);
    rank->head_dim = q.size(3);
    rank->grad_options = k.options().dtype(accumulator_type(k.scalar_type()));
    rank->held.resize(program.buffers.size());
    for (size_t b = 0; b < program.buffers.size(); ++b) {
      if (!program.buffers[b].holds_gradient()) rank->held[b] = keys_and_values(program.buffers[b].rows);
    }
    rank->lives = lifetimes(program, program.backward);
    for (const Step& step : program.backward) {
      std::vector<at::Tensor>& list = rank->places_of_adds.emplace_back();
      for (const Add& add : step.adds) {
        const RowSet &dst = program.buffers[static_cast<size_t>(add.dst)].rows,
                     &src = program.buffers[static_cast<size_t>(add.src)].rows;
        list.push_back(consecutive_rows(dst, src)
                           ? at::Tensor()
                           : at::tensor(places(dst, src), at::TensorOptions().dtype(at::kLong)).to(k.device()));
      }
    }
    rank->program = std::move(program);
    rank->call.program = rank->program.number.value();
    ranks_.push_back(std::move(rank));
  }
}

void SimulatedRing::forward() {
  const Kernel::Poll poll = [] {};  // kernels call it as over many ranks
  for (const auto& r : ranks_) {
    r->kernel = make_kernel(r->kernel_kind, r->q);
    r->kernel->begin_forward(r->q, r->call);
    for (const Step& step : r->program.forward) {
      r->compute_tiles(step, [&](std::span<const Tile> tiles) {
        r->kernel->forward(r->block(tiles[0].buffer, tiles[0].block), tiles, poll);
      });
    }
    r->kernel->finish_forward(r->out, r->lse);
    r->out = r->out.to(r->q.scalar_type());
    r->kernel.reset();
  }
}

void SimulatedRing::backward() {
  const Kernel::Poll poll = [] {};
  size_t steps = 0;
  for (const auto& r : ranks_) {
    for (size_t b = 0; b < r->held.size(); ++b) {
      if (r->program.buffers[b].holds_gradient()) r->held[b] = {};
    }
    r->kernel = make_kernel(r->kernel_kind, r->q);
    r->kernel->begin_backward(r->dout, r->q, r->out, r->lse, r->call);
    steps = std::max(steps, r->program.backward.size());
  }
  // Each step runs on all ranks before the next, because a gradient that a rank sends in one step is its receiver's in
  // the next.
  for (size_t s = 0; s < steps; ++s) {
    std::vector<std::pair<RowPair*, RowPair>> arriving;
    for (const auto& r : ranks_) {
      if (s >= r->program.backward.size()) continue;
      std::vector<size_t> seen(ranks_.size(), 0);  // the transfers between two ranks match by their order
      for (const Transfer& receive : r->program.backward[s].receives) {
        Rank& sender = *ranks_[static_cast<size_t>(receive.peer)];
        size_t number = seen[static_cast<size_t>(receive.peer)]++;
        for (const Transfer& send : sender.program.backward[s].sends) {
          if (send.peer != r->program.rank || number-- != 0) continue;
          if (r->program.buffers[static_cast<size_t>(receive.buffer)].holds_gradient()) {
            arriving.emplace_back(&r->pair(receive.buffer), sender.gradients(send.buffer));
          }
          break;
        }
      }
    }
    for (const auto& r : ranks_) {
      if (s >= r->program.backward.size()) continue;
      const Step& step = r->program.backward[s];
      r->fresh.clear();
      for (const int buffer : step.zero) {
        r->gradients(buffer);
        for (size_t b = 0; b < r->rows(buffer).blocks.size(); ++b) r->fresh.insert({buffer, static_cast<int>(b)});
      }
      r->compute_tiles(step, [&](std::span<const Tile> tiles) {
        r->gradients(tiles[0].grad_buffer);
        r->kernel->backward(r->block(tiles[0].buffer, tiles[0].block),
                            r->grads(tiles[0].grad_buffer, tiles[0].grad_block), tiles, poll);
      });
      while (!r->fresh.empty()) zero_if_fresh(r->grads(r->fresh.begin()->first, r->fresh.begin()->second));
    }
    for (auto& [to, from] : arriving) *to = std::move(from);
    for (const auto& r : ranks_) {
      if (s >= r->program.backward.size()) continue;
      for (size_t i = 0; i < r->program.backward[s].adds.size(); ++i) r->add(s, i);
      for (size_t b = 0; b < r->held.size(); ++b) {
        const Buffer& buffer = r->program.buffers[b];
        if (buffer.kind == BufferKind::kGrad && r->lives[b].last == static_cast<int>(s)) r->held[b] = {};
      }
    }
  }
  for (const auto& r : ranks_) {
    const at::ScalarType type = r->q.scalar_type();
    r->dq = r->kernel->finish_backward().to(type);
    RowPair& home = r->gradients(kOwnGradBuffer);
    home = {home.k.to(type), home.v.to(type)};
    r->kernel.reset();
  }
}

SimulatedRing::Result SimulatedRing::result() const {
  const AttentionShape& shape = ranks_[0]->program.request.shape;
  const at::Tensor& q = ranks_[0]->q;
  const int64_t dim = q.size(3);
  Result whole;
  whole.out = at::zeros({shape.batch, shape.q_len, shape.heads, dim}, q.options());
  whole.lse = at::zeros({shape.batch, shape.heads, shape.q_len}, ranks_[0]->lse.options());
  whole.dq = at::zeros(whole.out.sizes(), q.options());
  whole.dk = at::zeros({shape.batch, shape.k_len, shape.kv_heads, dim}, q.options());
  whole.dv = at::zeros(whole.dk.sizes(), q.options());
  for (const auto& r : ranks_) {
    put_rows(whole.out, 1, r->program.query_spans, r->out);
    put_rows(whole.lse, 2, r->program.query_spans, r->lse);
    if (!r->dq.defined()) continue;
    put_rows(whole.dq, 1, r->program.query_spans, r->dq);
    const RowPair& home = r->pair(kOwnGradBuffer);
    const std::vector<int64_t> sizes = {shape.batch, -1, shape.kv_heads, dim};
    put_rows(whole.dk, 1, r->program.key_spans, home.k.view(sizes));
    put_rows(whole.dv, 1, r->program.key_spans, home.v.view(sizes));
  }
  return whole;
}

}  // namespace annulus
