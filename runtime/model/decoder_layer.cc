// See decoder_layer.h.
#include "runtime/model/decoder_layer.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

#include "common/trace/recorder.h"
#include "memory/tiers/offload.h"
#include "runtime/model/choose_ops.h"
#include "runtime/model/products.h"
#include "runtime/model/row_tiles.h"

namespace annulus {
namespace {

at::Tensor rows_of(const at::Tensor& t, const RowTile& tile) {
  return t.defined() && t.size(0) != tile.count ? t.narrow(0, tile.begin, tile.count) : t;
}

// A tensor that is put together from the rows of tiles; that of a single tile is taken as it is.
class Rows {
 public:
  explicit Rows(int64_t rows) : rows_(rows) {}
  void put(const RowTile& tile, const at::Tensor& part) {
    if (tile.count == rows_) {
      all = part;
      return;
    }
    if (!all.defined()) {
      std::vector<int64_t> sizes = part.sizes().vec();
      sizes[0] = rows_;
      all = at::empty(sizes, part.options());
    }
    all.narrow(0, tile.begin, tile.count).copy_(part);
  }

  at::Tensor all;

 private:
  int64_t rows_;
};

// Adds the gradients of a leaf over tiles to the leaf's gradient.
class GradientSum {
 public:
  GradientSum(const at::Tensor& leaf, bool several_tiles)
      : gradient_(leaf.defined() && leaf.requires_grad() ? leaf.grad() : at::Tensor()),
        apart_(several_tiles && gradient_.defined() &&
               at::toOpMathType(gradient_.scalar_type()) != gradient_.scalar_type()) {}

  // Adds a^T b.
  void add_product(const at::Tensor& a, const at::Tensor& b) {
    if (!gradient_.defined()) return;
    if (!apart_) {
      at::addmm_out(gradient_, gradient_, a.t(), b);
    } else if (sum_.defined()) {
      add_wide_product(sum_, a.t(), b);
    } else {
      sum_ = wide_product(a.t(), b);
    }
  }
  void add(const at::Tensor& part) {
    if (!gradient_.defined()) return;
    if (!apart_) {
      gradient_.add_(part);
    } else if (sum_.defined()) {
      sum_.add_(part);
    } else {
      sum_ = part.to(at::toOpMathType(part.scalar_type()));
    }
  }
  // Adds the sums over the rows of dy, the gradient of a bias.
  void add_rows(const at::Tensor& dy) {
    if (!gradient_.defined()) return;
    add(apart_ ? dy.sum(at::IntArrayRef{0}, /*keepdim=*/false, at::toOpMathType(dy.scalar_type())) : dy.sum(0));
  }
  void finish() {
    if (sum_.defined()) gradient_.add_(sum_);
    sum_.reset();
  }

 private:
  at::Tensor gradient_;
  const bool apart_;  // whether tiles are summed in a wider dtype first
  at::Tensor sum_;
};

// RMSNorm of x + delta; x alone if delta is undefined.
RmsNorm norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& weight, double eps) {
  return ops_for({x, weight.weight, delta}).add_rms_norm(x, delta, weight, eps);
}
RmsNormGradient norm_gradient(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                              const NormWeight& weight, const at::Tensor& inv_rms) {
  return ops_for({sum, weight.weight, dy, dsum}).add_rms_norm_backward(dy, dsum, sum, weight, inv_rms);
}

// What the backward of a norm needs that has no residual: its input and statistics.
struct PostNorm {
  at::Tensor input, inv_rms;
};

// What attention or the MLP adds to the residual stream: `out`, or its norm if the layer has one.
at::Tensor post_normed(at::Tensor out, const NormWeight& weight, double eps, PostNorm& made) {
  if (!weight.weight.defined()) return out;
  RmsNorm n = norm(out, {}, weight, eps);
  made = {std::move(out), std::move(n.inv_rms)};
  return std::move(n.y);
}
// The gradient of `out` from that of what is added. Takes what the forward made.
at::Tensor post_norm_gradient(at::Tensor dy, PostNorm& made, const NormWeight& weight, GradientSum& dweight) {
  if (!weight.weight.defined()) return dy;
  const PostNorm of = std::exchange(made, {});
  RmsNormGradient g = norm_gradient(dy, {}, of.input, weight, of.inv_rms);
  dweight.add(g.dweight);
  return std::move(g.dx);
}

// What the backward of a tile's projection to heads needs besides its rows of the layer's input.
struct HeadsTile {
  at::Tensor y, inv_rms;          // of the norm
  at::Tensor qkv, heads_inv_rms;  // undefined without norms of heads
};

// What the backward of a tile's MLP needs.
struct MlpTile {
  PostNorm attention_out, out;  // empty without such norms
  at::Tensor sum, y, inv_rms;   // of the norm
  at::Tensor gate_up, product;
};

// A layer's forward, and what its backward needs.
struct LayerRun : torch::CustomClassHolder {
  LayerRun(const LayerSetting& setting, const LayerWeights& weights, int64_t layer, int64_t rows)
      : s(setting),
        w(weights),
        layer(layer),
        length(rows / std::max<int64_t>(1, setting.batch)),
        tiles(row_tiles(setting.batch, length, setting.tile)),
        several(tiles.size() > 1),
        rows(rows),
        before(place_before_attention(layer)),
        after(place_after_attention(layer)),
        last(layer + 1 == setting.shape.layers) {}

  std::vector<at::Tensor> forward(at::Tensor x, at::Tensor delta, const Attend& attend, bool keeps);
  at::Tensor backward(at::Tensor dsum, at::Tensor ddelta);

 private:
  Heads project(const RowTile& tile, RmsNorm norm, HeadsTile& made) const;
  MlpTile mlp(const RowTile& tile, bool keeps) const;
  at::Tensor mlp_added(MlpTile& m) const;
  Heads make_heads();
  void add_kept(StorageBytes& to) const;
  at::Tensor attended(const RowTile& tile) const;
  RotaryTable table_of(const RowTile& tile) const;
  // q, k and v of all rows as attention takes them.
  at::Tensor batched(const at::Tensor& t) const { return t.view({s.batch, length, t.size(1), t.size(2)}); }

  const LayerSetting s;
  const LayerWeights w;
  const int64_t layer, length;
  const std::vector<RowTile> tiles;
  const bool several;
  const int64_t rows;
  const size_t before, after;  // places
  const bool last;             // whether it is the last layer
  at::Tensor input;            // the sum of the layer's inputs
  Attended attention;
  Heads heads;                       // unless they are made again
  std::vector<HeadsTile> projected;  // of each tile, unless it is made again
  std::vector<MlpTile> mlps;         // likewise
  std::optional<int64_t> ticket;     // if input and attention.kept are with s.offload
};

RotaryTable LayerRun::table_of(const RowTile& tile) const {
  const RotaryTable& table = s.tables.of(layer);
  const int64_t positions = table.cosine.size(0);
  if (positions == length && tile.count % std::max<int64_t>(1, length) == 0) return table;
  const int64_t begin = positions == length ? tile.begin % length : tile.begin;
  return {table.cosine.narrow(0, begin, tile.count), table.sine.narrow(0, begin, tile.count)};
}

// Returns q, k and v of a tile, [rows of the tile, heads, head_dim] each. `norm` is that of the layer's input.
Heads LayerRun::project(const RowTile& tile, RmsNorm norm, HeadsTile& made) const {
  const ModelShape& m = s.shape;
  made.y = norm.y, made.inv_rms = norm.inv_rms;
  norm = {};
  at::Tensor qkv = linear_layer(made.y, w.qkv, w.qkv_bias);
  if (several) made.y.reset();
  if (m.qk_norm) {
    HeadNormed normed = ops_for({qkv, w.q_norm.weight, w.k_norm.weight})
                            .head_norm(qkv, w.q_norm, w.k_norm, m.heads, m.kv_heads, m.norm_eps);
    made.qkv = std::exchange(qkv, std::move(normed.y));
    made.heads_inv_rms = std::move(normed.inv_rms);
  }
  const RotaryTable table = table_of(tile);
  Heads h =
      ops_for_rotation(qkv, table.cosine, table.sine).rotary_split(qkv, table.cosine, table.sine, m.heads, m.kv_heads);
  for (at::Tensor* t : {&h.q, &h.k, &h.v}) *t = t->view({tile.count, t->size(2), t->size(3)});
  return h;
}

at::Tensor LayerRun::attended(const RowTile& tile) const {
  const at::Tensor out = rows_of(attention.kept[0].reshape({rows, s.shape.q_width()}), tile);
  return attention.divisor == 1 ? out : out.div(static_cast<double>(attention.divisor));
}

// Adds attention's output to the residual stream and runs the MLP of a tile up to its last projection. Without `keeps`
// only the sum and the product are returned.
MlpTile LayerRun::mlp(const RowTile& tile, bool keeps) const {
  MlpTile m;
  {
    const double eps = s.shape.norm_eps;
    const at::Tensor added =
        post_normed(linear_layer(attended(tile), w.out, w.out_bias), w.attention_post_norm, eps, m.attention_out);
    if (!keeps) m.attention_out = {};
    RmsNorm n = norm(rows_of(input, tile), added, w.mlp_norm, eps);
    m.sum = std::move(n.sum), m.y = std::move(n.y), m.inv_rms = std::move(n.inv_rms);
  }
  m.gate_up = linear_layer(m.y, w.gate_up, w.gate_up_bias);
  if (!keeps) m.y.reset();
  m.product = ops_for({m.gate_up}).glu(m.gate_up, s.shape.activation);
  if (!keeps) m.gate_up.reset();
  return m;
}

// What the MLP of a tile adds to the residual stream.
at::Tensor LayerRun::mlp_added(MlpTile& m) const {
  return post_normed(linear_layer(m.product, w.down, w.down_bias), w.mlp_post_norm, s.shape.norm_eps, m.out);
}

std::vector<at::Tensor> LayerRun::forward(at::Tensor x, at::Tensor delta, const Attend& attend, bool keeps) {
  const TraceLayer in_layer(layer);
  const TraceSpan span(TraceKind::kPhase, "layer forward");
  const bool whole = keeps && !s.recompute;
  if (s.use != nullptr) s.use->before_forward(before);
  Rows sum(rows), q(rows), k(rows), v(rows);
  for (const RowTile& tile : tiles) {
    const at::Tensor part = rows_of(x, tile), added = rows_of(delta, tile);
    RmsNorm n = norm(part, added, w.attention_norm, s.shape.norm_eps);
    if (delta.defined()) sum.put(tile, n.sum);
    n.sum.reset();
    HeadsTile made;
    const Heads h = project(tile, std::move(n), made);
    q.put(tile, h.q), k.put(tile, h.k), v.put(tile, h.v);
    if (whole) projected.push_back(std::move(made));
  }
  // Attention runs between the layer's places, where the weights need not be held.
  const at::Tensor sinks = w.sinks.defined() ? w.sinks.detach().clone() : at::Tensor();
  if (s.use != nullptr) s.use->after_forward(before);
  // Not the tensor of autograd itself, which would keep the graph before this node.
  input = delta.defined() ? sum.all : x.detach();
  sum.all.reset(), x.reset(), delta.reset();
  heads = {batched(q.all), batched(k.all), batched(v.all)};
  q.all.reset(), k.all.reset(), v.all.reset();
  attention = attend(heads.q, heads.k, heads.v, layer, sinks);
  if (!whole) heads = {};
  if (s.use != nullptr) s.use->before_forward(after);
  Rows next(rows), added(rows);
  for (const RowTile& tile : tiles) {
    MlpTile m = mlp(tile, whole);
    next.put(tile, m.sum);
    added.put(tile, mlp_added(m));
    m.sum = whole ? m.sum.detach() : at::Tensor();  // the node must not own its output
    if (whole) mlps.push_back(std::move(m));
  }
  if (s.use != nullptr && !last) s.use->after_forward(after);
  if (!keeps) {
    attention = {};
  } else if (s.offload != nullptr && s.offload->takes(layer)) {
    std::vector<at::Tensor> kept = std::exchange(attention.kept, {});
    kept.push_back(std::exchange(input, {}));
    ticket = s.offload->put(std::move(kept), std::exchange(attention.memory, nullptr));
  }
  if (keeps && s.kept != nullptr) add_kept(*s.kept);
  return {next.all, added.all};
}

void LayerRun::add_kept(StorageBytes& to) const {
  const auto add = [&](std::initializer_list<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) to.add(tensor);
  };
  add({input, heads.q, heads.k, heads.v});
  for (const at::Tensor& tensor : attention.kept) to.add(tensor);
  for (const HeadsTile& t : projected) add({t.y, t.inv_rms, t.qkv, t.heads_inv_rms});
  for (const MlpTile& t : mlps) {
    add({t.attention_out.input, t.attention_out.inv_rms, t.out.input, t.out.inv_rms});
    add({t.sum, t.y, t.inv_rms, t.gate_up, t.product});
  }
}

// Projects the layer's input to heads again.
Heads LayerRun::make_heads() {
  Rows q(rows), k(rows), v(rows);
  for (const RowTile& tile : tiles) {
    const at::Tensor x = rows_of(input, tile);
    RmsNorm n = norm(x, {}, w.attention_norm, s.shape.norm_eps);
    n.sum.reset();
    projected.emplace_back();
    const Heads h = project(tile, std::move(n), projected.back());
    q.put(tile, h.q), k.put(tile, h.k), v.put(tile, h.v);
  }
  return {batched(q.all), batched(k.all), batched(v.all)};
}

at::Tensor LayerRun::backward(at::Tensor dsum, at::Tensor ddelta) {
  const TraceLayer in_layer(layer);
  const TraceSpan span(TraceKind::kPhase, "layer backward");
  const ModelShape& m = s.shape;
  if (ticket) {
    attention.kept = s.offload->take(*ticket);
    input = std::move(attention.kept.back());
    attention.kept.pop_back();
  }
  if (s.offload != nullptr && s.offload->takes(layer - 1)) s.offload->fetch_next();
  if (s.use != nullptr && !last) s.use->before_backward(after);
  dsum = dsum.contiguous(), ddelta = ddelta.contiguous();
  Rows dx(rows), dout(rows);
  {
    GradientSum down(w.down, several), down_bias(w.down_bias, several), gate_up(w.gate_up, several),
        gate_up_bias(w.gate_up_bias, several), mlp_norm(w.mlp_norm.weight, several), out(w.out, several),
        out_bias(w.out_bias, several), post_norm(w.mlp_post_norm.weight, several),
        attention_post_norm(w.attention_post_norm.weight, several);
    for (size_t i = 0; i < tiles.size(); ++i) {
      const RowTile& tile = tiles[i];
      MlpTile t = mlps.empty() ? mlp(tile, /*keeps=*/true) : std::exchange(mlps[i], {});
      if (m.post_norms && !t.out.input.defined()) mlp_added(t);
      at::Tensor dgate_up;
      {
        at::Tensor dy = post_norm_gradient(rows_of(ddelta, tile), t.out, w.mlp_post_norm, post_norm);
        const at::Tensor dproduct = product(dy, w.down);
        down.add_product(dy, t.product);
        down_bias.add_rows(dy);
        dy.reset(), t.product.reset();
        dgate_up = ops_for({t.gate_up, dproduct}).glu_backward(dproduct, t.gate_up, m.activation);
        t.gate_up.reset();
      }
      RmsNormGradient g;
      {
        at::Tensor dy = product(dgate_up, w.gate_up);
        gate_up.add_product(dgate_up, t.y);
        gate_up_bias.add_rows(dgate_up);
        dgate_up.reset(), t.y.reset();
        const at::Tensor given = rows_of(dsum, tile);
        g = norm_gradient(dy, given, t.sum, w.mlp_norm, t.inv_rms);
      }
      mlp_norm.add(g.dweight);
      t.sum.reset();
      const at::Tensor dadded = post_norm_gradient(g.dx, t.attention_out, w.attention_post_norm, attention_post_norm);
      t = {};
      at::Tensor da = product(dadded, w.out);
      out.add_product(dadded, attended(tile));
      out_bias.add_rows(dadded);
      dout.put(tile, attention.divisor == 1 ? da : da.div_(static_cast<double>(attention.divisor)));
      dx.put(tile, g.dx);
    }
    for (GradientSum* sum :
         {&down, &down_bias, &gate_up, &gate_up_bias, &mlp_norm, &out, &out_bias, &post_norm, &attention_post_norm}) {
      sum->finish();
    }
  }
  dsum.reset(), ddelta.reset(), mlps.clear();
  if (s.use != nullptr) {
    s.use->after_backward(after);
    s.use->before_backward(before);
  }
  Heads d;
  {
    const Heads of = heads.q.defined() ? std::exchange(heads, {}) : make_heads();
    const at::Tensor of_out = std::exchange(dout.all, {}).view({s.batch, length, m.heads, m.head_dim()});
    d = attention.backward(of_out, of, attention.kept);
  }
  attention = {};
  const at::Tensor of_sinks = std::exchange(d.sinks, {});
  for (at::Tensor* t : {&d.q, &d.k, &d.v}) *t = t->contiguous().view({rows, t->size(2), t->size(3)});
  {
    GradientSum qkv(w.qkv, several), qkv_bias(w.qkv_bias, several), attention_norm(w.attention_norm.weight, several),
        q_norm(w.q_norm.weight, several), k_norm(w.k_norm.weight, several), sinks(w.sinks, /*several_tiles=*/false);
    if (of_sinks.defined()) sinks.add(of_sinks);
    for (size_t i = 0; i < tiles.size(); ++i) {
      const RowTile& tile = tiles[i];
      HeadsTile p = std::exchange(projected[i], {});
      const at::Tensor x = rows_of(input, tile);
      if (!p.y.defined()) p.y = norm(x, {}, w.attention_norm, m.norm_eps).y;
      at::Tensor dqkv;
      {
        const RotaryTable table = table_of(tile);
        const int64_t of_table = table.cosine.size(0);
        const auto batches = [&](const at::Tensor& t) {
          return rows_of(t, tile).view({-1, of_table, t.size(1), t.size(2)});
        };
        const Heads part{batches(d.q), batches(d.k), batches(d.v)};
        if (!several) d = {};
        dqkv = ops_for_rotation(part.q, table.cosine, table.sine).rotary_split_backward(part, table.cosine, table.sine);
      }
      if (m.qk_norm) {
        HeadNormGradient g = ops_for({p.qkv, w.q_norm.weight, w.k_norm.weight, dqkv})
                                 .head_norm_backward(dqkv, p.qkv, w.q_norm, w.k_norm, p.heads_inv_rms, m.heads);
        dqkv = std::move(g.dqkv);
        q_norm.add(g.dq_weight), k_norm.add(g.dk_weight);
        p.qkv.reset();
      }
      at::Tensor dy = product(dqkv, w.qkv);
      qkv.add_product(dqkv, p.y);
      qkv_bias.add_rows(dqkv);
      dqkv.reset(), p.y.reset();
      const at::Tensor given = rows_of(dx.all, tile);
      const RmsNormGradient g = norm_gradient(dy, given, x, w.attention_norm, p.inv_rms);
      attention_norm.add(g.dweight);
      dx.put(tile, g.dx);
    }
    for (GradientSum* sum : {&qkv, &qkv_bias, &attention_norm, &q_norm, &k_norm}) sum->finish();
  }
  input.reset(), projected.clear();
  if (s.use != nullptr) s.use->after_backward(before);
  return dx.all;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class LayerNode : public torch::autograd::Function<LayerNode> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& delta,
                               const c10::intrusive_ptr<LayerRun>& run, const Attend* attend) {
    context->saved_data["run"] = c10::IValue::make_capsule(run);
    context->saved_data["delta"] = delta.has_value();
    return run->forward(x, delta.value_or(at::Tensor()), *attend, /*keeps=*/true);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto run = c10::static_intrusive_pointer_cast<LayerRun>(context->saved_data["run"].toCapsule());
    at::Tensor dsum = std::move(grads[0]), ddelta = std::move(grads[1]);
    const at::Tensor dx = run->backward(std::move(dsum), std::move(ddelta));
    return {dx, context->saved_data["delta"].toBool() ? dx : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<at::Tensor> decoder_layer(const LayerSetting& setting, const LayerWeights& weights, int64_t layer,
                                      const Attend& attend, at::Tensor x, at::Tensor delta) {
  const auto run = c10::make_intrusive<LayerRun>(setting, weights, layer, x.size(0));
  if (!at::GradMode::is_enabled()) return run->forward(std::move(x), std::move(delta), attend, /*keeps=*/false);
  return LayerNode::apply(x, delta.defined() ? std::optional<at::Tensor>(delta) : std::nullopt, run, &attend);
}

}  // namespace annulus
