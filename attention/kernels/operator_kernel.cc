// See operator_kernel.h.
#include "attention/kernels/operator_kernel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "attention/kernels/dense_tiles.h"
#include "attention/kernels/merge.h"
#include "attention/kernels/tile_views.h"
#include "attention/kernels/upload.h"
#include "common/byte_cache.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kHeadMultiple = 8;  // of every operator's head sizes
constexpr int64_t kCacheBytes = int64_t{256} << 20;

// A composition with its lists of rows on the device.
struct Prepared {
  struct Rows {
    at::Tensor queries, keys, grads;  // int64
  };
  Composition composition;  // its gathered calls without their lists
  std::vector<Rows> rows;   // of each gathered call
  // What uploaded the lists may run on another stream than what reads them.
  mutable std::optional<c10::Event> uploaded;
  mutable std::atomic<bool> there = false;

  int64_t bytes() const {
    int64_t bytes = composition.bytes();
    for (const Rows& r : rows) {
      for (const at::Tensor* t : {&r.queries, &r.keys, &r.grads}) bytes += t->defined() ? t->nbytes() : 0;
    }
    return bytes;
  }
};

// ByteCache hands out values that were moved in once: what cannot be moved stands behind a pointer.
using PreparedPointer = std::shared_ptr<const Prepared>;

std::mutex held_mutex;
std::vector<std::shared_ptr<HeldCompositions::List>>& held_lists() {
  static auto& lists = *new std::vector<std::shared_ptr<HeldCompositions::List>>;
  return lists;
}

PreparedPointer prepare(std::span<const Tile> tiles, const CompositionInput& input, at::Device device) {
  auto prepared = std::make_shared<Prepared>();
  prepared->composition = compose(tiles, input);
  const auto list = [&](std::vector<int64_t>& rows) {
    if (rows.empty()) return at::Tensor();
    const at::Tensor host = at::from_blob(rows.data(), {static_cast<int64_t>(rows.size())}, at::kLong);
    const at::Tensor tensor = device.is_cpu() ? host.clone() : upload(host, device);
    rows = {};
    return tensor;
  };
  for (GatherCall& call : prepared->composition.gathered) {
    prepared->rows.push_back({list(call.query_rows), list(call.key_rows), list(call.grad_rows)});
  }
  if (!device.is_cpu() && !prepared->rows.empty()) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    prepared->uploaded.emplace(device.type());
    prepared->uploaded->record(streams.getStream(device));
  } else {
    prepared->there = true;
  }
  return prepared;
}

// From the cache, ready to be read on the current stream.
PreparedPointer prepared(std::span<const Tile> tiles, const CompositionInput& input, at::Device device) {
  static auto& cache = *new ByteCache<PreparedPointer>(kCacheBytes);
  const PreparedPointer found = *cache.get(
      device.str() + " " + fingerprint(tiles, input), [&] { return prepare(tiles, input, device); },
      [](const PreparedPointer& p) { return p->bytes(); });
  if (!found->rows.empty() && !device.is_cpu()) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    const c10::Stream stream = streams.getStream(device);
    // Once it is there nothing is asked any more: neither is allowed while a graph is captured.
    if (!found->there) {
      if (found->uploaded->query()) {
        found->there = true;
      } else {
        found->uploaded->block(stream);
      }
    }
    // The cache may let go while this stream still reads.
    for (const Prepared::Rows& r : found->rows) {
      for (const at::Tensor* t : {&r.queries, &r.keys, &r.grads}) {
        if (t->defined()) t->record_stream(stream);
      }
    }
  }
  const std::lock_guard lock(held_mutex);
  for (const auto& list : held_lists()) {
    if (std::find(list->begin(), list->end(), found) == list->end()) list->push_back(found);
  }
  return found;
}

// [.., D] -> [.., D'] with D' a multiple of kHeadMultiple, zeros behind: scores and gradients are the same. Contiguous,
// at an address that operators can load 16 bytes from.
at::Tensor fitted(const at::Tensor& tensor) {
  const int64_t more = (kHeadMultiple - tensor.size(-1) % kHeadMultiple) % kHeadMultiple;
  const at::Tensor t = (more == 0 ? tensor : at::constant_pad_nd(tensor, {0, more})).contiguous();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 ? t : t.clone();
}

// Whether an operator that prepares shapes may do so for this one: for the first kPlannedShapes of a process. Documents
// and selected blocks bring new shapes with every step.
bool may_prepare(const Band& band, const at::Tensor& q, const at::Tensor& k) {
  constexpr size_t kPlannedShapes = 64;
  static std::mutex mutex;
  static auto& shapes = *new std::set<std::array<int64_t, 7>>;
  const std::array<int64_t, 7> shape{q.size(0), q.size(1), q.size(2), k.size(1), k.size(2), q.size(3), band.hi};
  const std::lock_guard lock(mutex);
  if (shapes.count(shape) > 0) return true;
  return shapes.size() < kPlannedShapes && shapes.insert(shape).second;
}

bool covers(const Span& span, int64_t all) { return span == Span::range(0, all); }

// [B, rows, H, ..] as rows of `width` heads: [B * rows * H / width, width, ..].
at::Tensor as_rows(const at::Tensor& tensor, int64_t width) {
  std::vector<int64_t> shape{tensor.size(0) * tensor.size(1) * (tensor.size(2) / width), width};
  if (tensor.dim() == 4) shape.push_back(tensor.size(3));
  return tensor.view(shape);
}

// The named rows as [count, rows / count, width, ..].
at::Tensor gathered(const at::Tensor& tensor, int64_t width, const at::Tensor& rows, int64_t count) {
  const at::Tensor flat = as_rows(tensor, width).index_select(0, rows);
  return flat.unflatten(0, {count, flat.size(0) / count});
}

class OperatorKernel : public Kernel {
 public:
  OperatorKernel(std::vector<std::shared_ptr<const AttentionOperator>> operators, const CompositionInput& limits)
      : operators_(std::move(operators)), input_(limits) {
    input_.any_band = std::any_of(operators_.begin(), operators_.end(), [](const auto& o) { return o->any_band(); });
  }

  void begin_forward(const at::Tensor& q, const KernelCall& call) override { begin(q, call); }

  void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) override {
    const at::Tensor k = fitted(keys.k), v = fitted(keys.v);
    const KeyBlock block{k, v, keys.batch, keys.heads};
    run(
        keys, nullptr, tiles, poll,
        [&](const DirectCall& c) {
          const Span& rows = c.rectangle.query_rows;
          const Band& band = c.rectangle.band;
          const at::Tensor qs = rows_of(q_, c, rows), ks = keys_of(k, block, c), vs = keys_of(v, block, c);
          const auto part = operator_for(band, qs, ks, /*gathered=*/false).forward(qs, ks, vs, band, call_.scale);
          if (!out_.defined() && covers(c.batch, q_.size(0)) && covers(rows, q_.size(1)) &&
              covers(c.heads.query, q_.size(2))) {
            out_ = part.out;  // as it is: where nothing follows, it is never copied
            lse_ = part.lse.transpose(1, 2);
            return;
          }
          accumulate_out();
          merge_partial(rows_view(out_, c.batch, c.heads.query, rows), rows_view(lse_, c.batch, c.heads.query, rows),
                        part.out.transpose(1, 2), part.lse);
        },
        [&](const GatherCall& c, const Prepared::Rows& rows) {
          const at::Tensor qs = gathered(q_, c.heads, rows.queries, c.count);
          const at::Tensor ks = gathered(k, c.kv_heads, rows.keys, c.count);
          const at::Tensor vs = gathered(v, c.kv_heads, rows.keys, c.count);
          const auto part = operator_for(c.band, qs, ks, /*gathered=*/true).forward(qs, ks, vs, c.band, call_.scale);
          accumulate_out();
          const auto by_head = [](const at::Tensor& flat) { return flat.transpose(0, 1).unsqueeze(0); };
          merge_partial(by_head(as_rows(out_, c.heads)), by_head(as_rows(lse_, c.heads)),
                        by_head(part.out.flatten(0, 1)), part.lse.transpose(0, 1).flatten(1, 2).unsqueeze(0),
                        rows.queries);
        },
        [&](const Tile& tile) {
          accumulate_out();
          at::Tensor out = out_.narrow(3, 0, head_dim_), lse = lse_.transpose(1, 2);
          dense_tile_forward(in_accumulator(q_), keys, tile, call_, out, lse, poll);
        });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    if (!out_.defined()) accumulate_out();  // not one pair
    out = out_.narrow(3, 0, head_dim_);
    lse = lse_.transpose(1, 2).contiguous();
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    begin(q, call);
    dout_ = fitted(dout);
    out_ = fitted(out);
    // exp(score - lse) must be 0 in rows without keys.
    lse_ = lse.masked_fill(lse.eq(-kInfinity), kInfinity).transpose(1, 2).contiguous();
  }

  void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    const at::Tensor k = fitted(keys.k), v = fitted(keys.v);
    const KeyBlock block{k, v, keys.batch, keys.heads};
    run(
        keys, &grads, tiles, poll,
        [&](const DirectCall& c) {
          const Span& rows = c.rectangle.query_rows;
          const Band& band = c.rectangle.band;
          const at::Tensor qs = rows_of(q_, c, rows), ks = keys_of(k, block, c), vs = keys_of(v, block, c);
          const at::Tensor lse = rows_view(lse_, c.batch, c.heads.query, rows).contiguous();
          const auto part =
              operator_for(band, qs, ks, /*gathered=*/false)
                  .backward(rows_of(dout_, c, rows), qs, ks, vs, rows_of(out_, c, rows), lse, band, call_.scale);
          count(part);
          const auto add_keys = [&](const at::Tensor& to, const at::Tensor& from) {
            block_view(to, grads, c.batch, c.heads.kv, c.rectangle.grad_rows)
                .add_(from.narrow(3, 0, head_dim_).transpose(1, 2));
          };
          add_keys(grads.k, part.dk);
          add_keys(grads.v, part.dv);
          if (!dq_.defined() && covers(c.batch, q_.size(0)) && covers(rows, q_.size(1)) &&
              covers(c.heads.query, q_.size(2))) {
            dq_ = part.dq;
            return;
          }
          accumulate_dq();
          rows_view(dq_, c.batch, c.heads.query, rows).add_(part.dq.transpose(1, 2));
        },
        [&](const GatherCall& c, const Prepared::Rows& rows) {
          const auto of_queries = [&](const at::Tensor& t) { return gathered(t, c.heads, rows.queries, c.count); };
          const at::Tensor qs = of_queries(q_), lse = of_queries(lse_).transpose(1, 2).contiguous();
          const at::Tensor ks = gathered(k, c.kv_heads, rows.keys, c.count);
          const at::Tensor vs = gathered(v, c.kv_heads, rows.keys, c.count);
          const auto part = operator_for(c.band, qs, ks, /*gathered=*/true)
                                .backward(of_queries(dout_), qs, ks, vs, of_queries(out_), lse, c.band, call_.scale);
          count(part);
          accumulate_dq();
          const auto add = [&](const at::Tensor& to, int64_t width, const at::Tensor& row, const at::Tensor& from) {
            as_rows(to, width).index_add_(0, row, from.narrow(3, 0, to.size(3)).flatten(0, 1).to(to.scalar_type()));
          };
          add(dq_, c.heads, rows.queries, part.dq);
          add(grads.k, c.kv_heads, rows.grads, part.dk);
          add(grads.v, c.kv_heads, rows.grads, part.dv);
        },
        [&](const Tile& tile) {
          accumulate_dq();
          const auto whole = [&](const at::Tensor& t) { return in_accumulator(t); };
          at::Tensor dq = dq_.narrow(3, 0, head_dim_);
          const int64_t held = dense_tile_backward({whole(dout_), whole(q_), whole(out_), lse_.transpose(1, 2)}, keys,
                                                   grads, tile, call_, dq, poll);
          peak_result_elements_ = std::max(peak_result_elements_, held);
        });
  }

  at::Tensor finish_backward() override {
    if (!dq_.defined()) accumulate_dq();
    return dq_.narrow(3, 0, head_dim_);
  }

 private:
  void begin(const at::Tensor& q, const KernelCall& call) {
    call_ = call;
    head_dim_ = q.size(3);
    type_ = accumulator_type(q.scalar_type());
    q_ = fitted(q);
    input_.rows = q.size(1), input_.heads = q.size(2), input_.group = call.group;
  }

  template <typename Direct, typename Gathered, typename Dense>
  void run(const KeyBlock& keys, const KeyBlock* grads, std::span<const Tile> tiles, const Poll& poll, Direct direct,
           Gathered gather, Dense dense) {
    if (call_.dropout.rate > 0) {  // whose draws no operator knows
      for (const Tile& tile : tiles) dense(tile);
      return;
    }
    input_.keys = {keys.batch, keys.heads, keys.k.size(1)};
    input_.grads = grads ? BlockShape{grads->batch, grads->heads, grads->k.size(1)} : BlockShape{};
    const PreparedPointer what = prepared(tiles, input_, q_.device());
    for (const DirectCall& call : what->composition.direct) {
      direct(call);
      if (poll) poll();
    }
    for (size_t i = 0; i < what->rows.size(); ++i) {
      gather(what->composition.gathered[i], what->rows[i]);
      if (poll) poll();
    }
    for (const Tile& tile : what->composition.dense) dense(tile);
  }

  // The first that takes the call and has a plan for its shape or may make one; where there is none, the last that
  // takes it.
  const AttentionOperator& operator_for(const Band& band, const at::Tensor& q, const at::Tensor& k,
                                        bool gathered) const {
    const bool simple = band.unbounded_below() && (band.unbounded_above() || band.hi == 0);
    const AttentionOperator* last = nullptr;
    for (const auto& o : operators_) {
      if (!o->takes(q.size(1), k.size(1)) || !(simple || o->any_band())) continue;
      last = o.get();
      if (!o->prepares_shapes() || (!gathered && may_prepare(band, q, k))) return *o;
    }
    if (last) return *last;
    throw Error(ErrorKind::kInternal, "kernel",
                "no operator takes " + std::to_string(q.size(1)) + " queries and " + std::to_string(k.size(1)) +
                    " keys with the band " + to_string(band));
  }

  // The operators' layout: [b, n, h, D].
  static at::Tensor rows_of(const at::Tensor& t, const DirectCall& c, const Span& rows) {
    return rows_view(t, c.batch, c.heads.query, rows).transpose(1, 2);
  }
  static at::Tensor keys_of(const at::Tensor& t, const KeyBlock& block, const DirectCall& c) {
    return block_view(t, block, c.batch, c.heads.kv, c.rectangle.key_rows).transpose(1, 2);
  }

  // In the accumulator's dtype, without the zeros that `fitted` added.
  at::Tensor in_accumulator(const at::Tensor& t) const { return t.narrow(3, 0, head_dim_).to(type_); }

  void accumulate_out() {
    if (out_.defined() && accumulates_) return;
    accumulates_ = true;
    if (out_.defined()) {
      out_ = out_.to(type_).contiguous();
      lse_ = lse_.contiguous();
      return;
    }
    out_ = at::zeros(q_.sizes(), q_.options().dtype(type_));
    lse_ = at::full({q_.size(0), q_.size(1), q_.size(2)}, -kInfinity, out_.options());
  }
  void accumulate_dq() {
    if (dq_.defined() && accumulates_) return;
    accumulates_ = true;
    dq_ = dq_.defined() ? dq_.to(type_).contiguous() : at::zeros(q_.sizes(), q_.options().dtype(type_));
  }
  void count(const AttentionOperator::Backward& part) {
    peak_result_elements_ = std::max(peak_result_elements_, part.dk.numel() + part.dv.numel());
  }

  const std::vector<std::shared_ptr<const AttentionOperator>> operators_;
  CompositionInput input_;
  KernelCall call_;
  int64_t head_dim_ = 0;
  at::ScalarType type_ = at::kFloat;
  // [B, n, H, D'], lse_ [B, n, H]. out_ and dq_ are what the only call so far gave, until accumulates_.
  at::Tensor q_, out_, lse_, dout_, dq_;
  bool accumulates_ = false;
};

}  // namespace

HeldCompositions::HeldCompositions() : list_(std::make_shared<List>()) {
  const std::lock_guard lock(held_mutex);
  held_lists().push_back(list_);
}

void HeldCompositions::stop() {
  const std::lock_guard lock(held_mutex);
  std::erase(held_lists(), list_);
}

std::unique_ptr<Kernel> make_operator_kernel(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                                             const CompositionInput& limits) {
  return std::make_unique<OperatorKernel>(std::move(operators), limits);
}

}  // namespace annulus
