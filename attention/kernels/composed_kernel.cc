// The composed kernel; see composed_kernel.h.
#include "attention/kernels/composed_kernel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nan_to_num.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>

#include "attention/kernels/detect.h"
#include "attention/tiles/dense_tiles.h"
#include "attention/tiles/merge.h"
#include "attention/tiles/tile_views.h"
#include "memory/caches.h"
#include "memory/upload.h"

namespace annulus {
namespace {

constexpr int64_t kHeadMultiple = 8;  // every operator needs a head size that is a multiple of this

// A composition with its lists of rows on the device.
struct Prepared {
  struct Rows {
    at::Tensor queries, keys, grads;  // int64
  };
  Composition composition;  // without the lists of its gathered calls
  std::vector<Rows> rows;   // the lists of each gathered call
  KeptUploads uploads;

  int64_t bytes() const {
    int64_t bytes = composition.bytes();
    for (const Rows& r : rows) {
      for (const at::Tensor* t : {&r.queries, &r.keys, &r.grads}) bytes += t->defined() ? t->nbytes() : 0;
    }
    return bytes;
  }
};

// ByteCache moves values into the cache, so a value that cannot be moved is held by a pointer.
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
  if (!prepared->rows.empty()) prepared->uploads.mark(device);
  return prepared;
}

// Returns the composition of a program's tiles from the cache, with lists that can be read on the current stream. Tiles
// of a program that does not come again (0) are composed anew.
PreparedPointer prepared(uint64_t program, std::span<const Tile> tiles, const CompositionInput& input,
                         at::Device device) {
  static auto& cache = *new NamedCache<PreparedPointer>("compositions");
  PreparedPointer found;
  if (program == 0) {
    found = prepare(tiles, input, device);
  } else {
    const std::string key = device.str() + " " + composition_key(program, tiles, input);
    found = *cache.get(
        key, [&] { return prepare(tiles, input, device); }, [](const PreparedPointer& p) { return p->bytes(); });
    // Lists that were uploaded while a CUDA graph was captured are filled when it is replayed, so only that graph may
    // use them.
    if (found->uploads.captured()) cache.erase(key);
  }
  for (const Prepared::Rows& r : found->rows) found->uploads.read({r.queries, r.keys, r.grads});
  const std::lock_guard lock(held_mutex);
  for (const auto& list : held_lists()) {
    if (std::find(list->begin(), list->end(), found) == list->end()) list->push_back(found);
  }
  return found;
}

// aligned() makes a tensor contiguous, at an address that is a multiple of 16 bytes, and with the strides of a new
// tensor. A tensor with a dimension of size 1 may be contiguous with other strides, but operators cache plans by
// strides. fitted() also pads [.., D] with zeros to [.., D'], where D' is a multiple of kHeadMultiple. This changes
// neither scores nor gradients.
at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor t = tensor.contiguous();
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return t.clone(at::MemoryFormat::Contiguous);
  const c10::DimVector strides = c10::contiguous_strides(t.sizes());
  return t.strides() == at::IntArrayRef(strides) ? t : t.as_strided(t.sizes(), strides);
}
at::Tensor fitted(const at::Tensor& tensor) {
  const int64_t more = (kHeadMultiple - tensor.size(-1) % kHeadMultiple) % kHeadMultiple;
  return aligned(more == 0 ? tensor : at::constant_pad_nd(tensor, {0, more}));
}

bool covers(const Span& span, int64_t all) { return span == Span::range(0, all); }

// Views [B, rows, H, ..] as rows of `width` heads: [B * rows * H / width, width, ..].
at::Tensor as_rows(const at::Tensor& tensor, int64_t width) {
  std::vector<int64_t> shape{tensor.size(0) * tensor.size(1) * (tensor.size(2) / width), width};
  if (tensor.dim() == 4) shape.push_back(tensor.size(3));
  return tensor.view(shape);
}

// Copies the rows with these numbers to [count, rows / count, width, ..].
at::Tensor gathered(const at::Tensor& tensor, int64_t width, const at::Tensor& rows, int64_t count) {
  const at::Tensor flat = as_rows(tensor, width).index_select(0, rows);
  return flat.unflatten(0, {count, flat.size(0) / count});
}

// Adds up parts of [B, n, H, D'] rows, merging them by their lse (forward) or plainly (gradients). Parts wait for each
// other, so that one pass over memory merges them: up to kMostParts, as long as they hold at most `most_waiting` bytes.
// So few long rows do not hold the results of eight blocks; a pass over these takes little of the time in which they
// are computed.
class RowSums {
 public:
  RowSums(const at::Tensor& like, at::ScalarType type, bool merges, int64_t most_waiting)
      : like_(like), type_(type), merges_(merges), most_waiting_(most_waiting) {}

  // Adds the result of a direct call: values [b, n', h, D'] in the dtype of `like`, and lse [b, h, n'].
  void add(const DirectCall& c, const at::Tensor& values, const at::Tensor& lse) {
    const int64_t bytes = static_cast<int64_t>(values.nbytes());
    if (!waiting_.empty() && (waiting_.size() == kMostParts || waiting_bytes_ + bytes > most_waiting_)) settle();
    waiting_.push_back({values.transpose(1, 2), lse, c.batch, c.heads.query, c.rectangle.query_rows});
    waiting_bytes_ += bytes;
  }

  // The accumulators with all parts added: [B, n, H, D'] and [B, n, H].
  const at::Tensor& values() { return settle(), values_; }
  const at::Tensor& lse() { return settle(), lse_; }

  struct Result {
    at::Tensor values, lse;  // [B, n, H, D'], [B, H, n]
  };
  Result finish() {
    if (!values_.defined() && waiting_.size() == 1 && waiting_[0].out.numel() == like_.numel()) {
      return {waiting_[0].out.transpose(1, 2), merges_ ? waiting_[0].lse.contiguous() : at::Tensor()};
    }
    if (waiting_.empty()) {
      settle();
      return {values_, merges_ ? lse_.transpose(1, 2).contiguous() : at::Tensor()};
    }
    // The last pass writes the result in its final dtype.
    Result result{at::empty_like(like_), {}};
    if (merges_) result.lse = at::empty({like_.size(0), like_.size(2), like_.size(1)}, options());
    merge_waiting(by_head(result.values), result.lse, by_head(values_), by_head(lse_));
    return result;
  }

 private:
  at::TensorOptions options() const { return like_.options().dtype(type_); }

  static at::Tensor by_head(const at::Tensor& t) { return t.defined() ? t.transpose(1, 2) : t; }

  // As merge_parts, with what waits.
  void merge_waiting(const at::Tensor& values, const at::Tensor& lse, const at::Tensor& before_values,
                     const at::Tensor& before_lse) {
    merge_parts(values, lse, before_values, before_lse, waiting_);
    waiting_.clear();
    waiting_bytes_ = 0;
  }

  // Merges what waits into the accumulators, in place. Only batch rows, heads and rows from the first to the last of a
  // part's are looked at.
  void merge_in_place() {
    const auto hull = [&](Span MergePart::*member) {
      int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
      for (const MergePart& part : waiting_) {
        const Span& span = part.*member;
        begin = std::min(begin, span.begin), end = std::max(end, span.last() + 1);
      }
      for (MergePart& part : waiting_) (part.*member).begin -= begin;
      return Span::range(begin, end);
    };
    const Span batch = hull(&MergePart::batch), heads = hull(&MergePart::heads), rows = hull(&MergePart::rows);
    const at::Tensor values = rows_view(values_, batch, heads, rows);
    const at::Tensor lse = merges_ ? rows_view(lse_, batch, heads, rows) : at::Tensor();
    merge_waiting(values, lse, values, lse);
  }

  void settle() {
    if (values_.defined() && waiting_.empty()) return;
    if (values_.defined()) return merge_in_place();
    const at::Tensor values = at::empty(like_.sizes(), options());
    const at::Tensor lse = merges_ ? at::empty({like_.size(0), like_.size(1), like_.size(2)}, options()) : at::Tensor();
    merge_waiting(by_head(values), by_head(lse), {}, {});
    values_ = values, lse_ = lse;
  }

  const at::Tensor like_;  // q, padded for the operators
  const at::ScalarType type_;
  const bool merges_;
  const int64_t most_waiting_;
  at::Tensor values_, lse_;
  std::vector<MergePart> waiting_;
  int64_t waiting_bytes_ = 0;
};

class ComposedKernel : public Kernel {
 public:
  ComposedKernel(std::vector<std::shared_ptr<const AttentionOperator>> operators, const ComposedKernelOptions& options)
      : operators_(std::move(operators), *options.history),
        most_waiting_(options.most_waiting),
        input_(options.limits) {
    input_.any_band = operators_.any_band();
  }

  void begin_forward(const at::Tensor& q, const KernelCall& call) override {
    begin(q, call);
    sums_.emplace(q_, type_, /*merges=*/true, most_waiting_);
  }

  void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) override {
    const at::Tensor k = fitted(keys.k), v = fitted(keys.v);
    const KeyBlock block{k, v, keys.batch, keys.heads};
    run(
        keys, nullptr, tiles, poll,
        [&](const DirectCall& c) {
          const Span& rows = c.rectangle.query_rows;
          const Band& band = c.rectangle.band;
          const at::Tensor qs = rows_of(q_, c, rows), ks = keys_of(k, block, c), vs = keys_of(v, block, c);
          const auto part = operators_.forward(qs, ks, vs, band, call_.scale, /*gathered=*/false);
          sums_->add(c, part.out, part.lse);
        },
        [&](const GatherCall& c, const Prepared::Rows& rows) {
          const at::Tensor qs = gathered(q_, c.heads, rows.queries, c.count);
          const at::Tensor ks = gathered(k, c.kv_heads, rows.keys, c.count);
          const at::Tensor vs = gathered(v, c.kv_heads, rows.keys, c.count);
          const auto part = operators_.forward(qs, ks, vs, c.band, call_.scale, /*gathered=*/true);
          const auto by_head = [](const at::Tensor& flat) { return flat.transpose(0, 1).unsqueeze(0); };
          merge_partial(by_head(as_rows(sums_->values(), c.heads)), by_head(as_rows(sums_->lse(), c.heads)),
                        by_head(part.out.flatten(0, 1)), part.lse.transpose(0, 1).flatten(1, 2).unsqueeze(0),
                        rows.queries);
        },
        [&](const Tile& tile) {
          at::Tensor out = sums_->values().narrow(3, 0, head_dim_), lse = sums_->lse().transpose(1, 2);
          dense_tile_forward(wide().q, keys, tile, call_, out, lse, poll);
        });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    const RowSums::Result result = sums_->finish();
    out = result.values.narrow(3, 0, head_dim_);
    lse = result.lse;
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    begin(q, call);
    dout_ = fitted(dout);
    out_ = fitted(out);
    // exp(score - lse) must be 0 in rows without keys.
    constexpr double infinity = std::numeric_limits<double>::infinity();
    lse_ = at::nan_to_num(lse, std::numeric_limits<double>::quiet_NaN(), infinity, infinity);
    sums_.emplace(q_, type_, /*merges=*/false, most_waiting_);
  }

  void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    const at::Tensor k = fitted(keys.k), v = fitted(keys.v);
    const KeyBlock block{k, v, keys.batch, keys.heads};
    bool fresh = grads.fresh;
    // Called before each addition to `grads`. Returns true if the gradients hold nothing yet and this addition sets all
    // of them; if they hold nothing and it does not, they are zeroed first.
    const auto sets_all = [&](bool all) {
      if (fresh && !all) zero_if_fresh(grads);
      return std::exchange(fresh, false) && all;
    };
    run(
        keys, &grads, tiles, poll,
        [&](const DirectCall& c) {
          const auto part = direct_backward(c, block);
          count(part);
          const bool sets = sets_all(covers_block(c, grads));
          const auto give = [&](const at::Tensor& all, const at::Tensor& from) {
            const at::Tensor to = block_view(all, grads, c.batch, c.heads.kv, c.rectangle.grad_rows);
            const at::Tensor values = from.narrow(3, 0, head_dim_).transpose(1, 2);
            sets ? to.copy_(values) : to.add_(values);
          };
          give(grads.k, part.dk);
          give(grads.v, part.dv);
        },
        [&](const GatherCall& c, const Prepared::Rows& rows) {
          const auto of_queries = [&](const at::Tensor& t) { return gathered(t, c.heads, rows.queries, c.count); };
          const at::Tensor qs = of_queries(q_), lse = of_queries(lse_rows()).transpose(1, 2).contiguous();
          const at::Tensor ks = gathered(k, c.kv_heads, rows.keys, c.count);
          const at::Tensor vs = gathered(v, c.kv_heads, rows.keys, c.count);
          const auto part = operators_.backward(of_queries(dout_), qs, ks, vs, of_queries(out_), lse, c.band,
                                                call_.scale, /*gathered=*/true);
          count(part);
          sets_all(false);
          const auto add = [&](const at::Tensor& to, int64_t width, const at::Tensor& row, const at::Tensor& from) {
            as_rows(to, width).index_add_(0, row, from.narrow(3, 0, to.size(3)).flatten(0, 1).to(to.scalar_type()));
          };
          add(sums_->values(), c.heads, rows.queries, part.dq);
          add(grads.k, c.kv_heads, rows.grads, part.dk);
          add(grads.v, c.kv_heads, rows.grads, part.dv);
        },
        [&](const Tile& tile) {
          sets_all(false);
          at::Tensor dq = sums_->values().narrow(3, 0, head_dim_);
          const int64_t held = dense_tile_backward(wide(), keys, grads, tile, call_, dq, poll);
          peak_result_elements_ = std::max(peak_result_elements_, held);
        });
    sets_all(false);  // zeroes the gradients if there was no pair
  }

  at::Tensor finish_backward() override { return sums_->finish().values.narrow(3, 0, head_dim_); }

  std::optional<KeyGradients> whole_backward(const KeyBlock& keys, std::span<const Tile> tiles,
                                             const Poll& poll) override {
    if (dense_only()) return std::nullopt;
    const PreparedPointer what = composed(keys, &keys, tiles);
    const Composition& c = what->composition;
    const bool one = c.direct.size() == 1 && c.gathered.empty() && c.dense.empty();
    if (!one || !covers_block(c.direct[0], keys) || c.direct[0].rectangle.key_rows != c.direct[0].rectangle.grad_rows) {
      of_next_call_ = what;
      return std::nullopt;
    }
    const auto part = direct_backward(c.direct[0], {fitted(keys.k), fitted(keys.v), keys.batch, keys.heads});
    if (poll) poll();
    return KeyGradients{part.dk.narrow(3, 0, head_dim_), part.dv.narrow(3, 0, head_dim_)};
  }

  std::vector<Charge> charges(const CallSize& size) const override {
    const int64_t e = size.element(), wide = static_cast<int64_t>(c10::elementSize(accumulator_type(size.type)));
    const int64_t queries = size.query_elements(), lse = size.lse_elements() * wide;
    // The result of a single block is that of the call. The results of several blocks are held until they are summed.
    const int64_t waiting =
        std::min(static_cast<int64_t>(kMostParts) * queries * e, std::max(most_waiting_, queries * e));
    const int64_t sums = size.blocks > 1 ? queries * wide + waiting : 0;
    // Calls without a band or with a causal one go to the first operator, unless it refuses them.
    const int64_t own = operators_.backward_bytes(operator_size(size), size.gathers);
    std::vector<Charge> charges = {{"results that wait", sums, When::kForward},
                                   {"dq", size.blocks > 1 ? sums : queries * e, When::kBackward},
                                   {"lse", lse, When::kBackward},
                                   {"dk and dv of an operator", size.key_elements() * e, When::kBackward},
                                   {"an operator's own", own, When::kBackward}};
    if (size.head_dim % kHeadMultiple != 0) {
      charges.push_back({"q, keys and values, padded", 2 * (queries + size.key_elements()) * e, When::kForward});
      charges.push_back(
          {"q, out, dout, keys and values, padded", 2 * (3 * queries + size.key_elements()) * e, When::kBackward});
    }
    add_dense_charges(size, wide, charges);
    if (size.gathers) {
      // The rows x heads of a gathered call's longer side: at most those of q or of a block's keys, and at most the
      // limit.
      const int64_t rows = std::max(size.queries * size.heads, size.keys * size.kv_heads) * size.batch;
      const int64_t one = std::min(rows, input_.most_gathered) * size.head_dim;
      charges.push_back({"gathered q, k, v and out", 4 * one * e, When::kForward});
      charges.push_back({"gathered q, k, v, out and their gradients", 8 * one * e + one * wide, When::kBackward});
      charges.push_back({"sum of gathered dq", queries * wide, When::kBackward});
    }
    return charges;
  }

 private:
  void begin(const at::Tensor& q, const KernelCall& call) {
    call_ = call;
    head_dim_ = q.size(3);
    type_ = accumulator_type(q.scalar_type());
    q_ = fitted(q);
    input_.rows = q.size(1), input_.heads = q.size(2), input_.group = call.group;
  }

  // No operator can reproduce the draws of dropout, or cap scores.
  bool dense_only() const { return call_.dropout.rate > 0 || call_.softcap > 0; }

  template <typename Direct, typename Gathered, typename Dense>
  void run(const KeyBlock& keys, const KeyBlock* grads, std::span<const Tile> tiles, const Poll& poll, Direct direct,
           Gathered gather, Dense dense) {
    if (dense_only()) {
      for (const Tile& tile : tiles) dense(tile);
      return;
    }
    const PreparedPointer what = composed(keys, grads, tiles);
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

  PreparedPointer composed(const KeyBlock& keys, const KeyBlock* grads, std::span<const Tile> tiles) {
    if (of_next_call_) return std::exchange(of_next_call_, nullptr);
    input_.keys = {keys.batch, keys.heads, keys.k.size(1)};
    input_.grads = grads ? BlockShape{grads->batch, grads->heads, grads->k.size(1)} : BlockShape{};
    return prepared(call_.program, tiles, input_, q_.device());
  }

  // Computes a call with keys of `block`, whose tensors are fitted. Adds up its dq and returns dk and dv.
  AttentionOperator::Backward direct_backward(const DirectCall& c, const KeyBlock& block) {
    const Span& rows = c.rectangle.query_rows;
    const at::Tensor lse = aligned(lse_view(lse_, c.batch, c.heads.query, rows));
    const auto part = operators_.backward(rows_of(dout_, c, rows), rows_of(q_, c, rows), keys_of(block.k, block, c),
                                          keys_of(block.v, block, c), rows_of(out_, c, rows), lse, c.rectangle.band,
                                          call_.scale, /*gathered=*/false);
    sums_->add(c, part.dq, {});
    return part;
  }
  // Whether the call's gradients are those of all rows, kv heads and batch rows of a block.
  static bool covers_block(const DirectCall& c, const KeyBlock& block) {
    return c.batch == block.batch && c.heads.kv == block.heads && covers(c.rectangle.grad_rows, block.k.size(1));
  }

  // Views in the layout of operators, [b, n, h, D].
  static at::Tensor rows_of(const at::Tensor& t, const DirectCall& c, const Span& rows) {
    return rows_view(t, c.batch, c.heads.query, rows).transpose(1, 2);
  }
  static at::Tensor keys_of(const at::Tensor& t, const KeyBlock& block, const DirectCall& c) {
    return block_view(t, block, c.batch, c.heads.kv, c.rectangle.key_rows).transpose(1, 2);
  }

  // The call's queries in the accumulator's dtype without the padding of `fitted`, for dense tiles; made at the first
  // use.
  const DenseQueries& wide() {
    const auto widened = [&](const at::Tensor& t) { return t.defined() ? t.narrow(3, 0, head_dim_).to(type_) : t; };
    if (!wide_.q.defined()) wide_ = {widened(dout_), widened(q_), widened(out_), lse_};
    return wide_;
  }
  static OperatorSize operator_size(const CallSize& size) {
    return {.batch = size.batch,
            .queries = size.queries,
            .keys = size.keys,
            .heads = size.heads,
            .kv_heads = size.kv_heads,
            .head_dim = size.head_dim,
            .element = size.element(),
            .deterministic = deterministic_only(),
            .multiprocessors = gpu_abilities().multiprocessors};
  }
  // lse as [B, n, H], from which rows are gathered.
  const at::Tensor& lse_rows() {
    if (!lse_rows_.defined()) lse_rows_ = lse_.transpose(1, 2).contiguous();
    return lse_rows_;
  }
  void count(const AttentionOperator::Backward& part) {
    peak_result_elements_ = std::max(peak_result_elements_, part.dk.numel() + part.dv.numel());
  }

  const OperatorList operators_;
  const int64_t most_waiting_;
  CompositionInput input_;
  KernelCall call_;
  int64_t head_dim_ = 0;
  at::ScalarType type_ = at::kFloat;
  at::Tensor q_, dout_, out_;  // [B, n, H, D']; dout_ and out_ in the backward only
  at::Tensor lse_, lse_rows_;  // backward: [B, H, n] and [B, n, H], +inf in rows without keys
  DenseQueries wide_;
  std::optional<RowSums> sums_;  // forward: out and lse; backward: dq
  // What whole_backward() has found for the tiles that it left to backward().
  PreparedPointer of_next_call_;
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

std::unique_ptr<Kernel> make_composed_kernel(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                                             const ComposedKernelOptions& options) {
  return std::make_unique<ComposedKernel>(std::move(operators), options);
}

}  // namespace annulus
