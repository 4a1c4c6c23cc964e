// What a layer declares to hold (decoder_layer.h), in the order of decoder_layer.cc.
#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "runtime/model/decoder_layer.h"
#include "runtime/model/row_tiles.h"

namespace annulus {

int64_t tile_rows(const ModelShape& shape, const Computes& on) {
  const int64_t width = std::max(2 * shape.ffn, shape.q_width() + 2 * shape.kv_width()) * on.element();
  const int64_t rows = (on.gpu ? kTileBytes : kTileBytesOnCpu) / width;
  return std::max<int64_t>(128, rows / 128 * 128);
}

namespace {

// The sizes in bytes of a layer's tensors: of all rows, and of the largest tile.
struct Sizes {
  Sizes(const ModelShape& s, int64_t batch, int64_t length, const Computes& on)
      : rows(batch * length), several(rows > tile_rows(s, on)) {
    for (const RowTile& tile : row_tiles(batch, length, tile_rows(s, on)))
      tile_rows_most = std::max(tile_rows_most, tile.count);
    const int64_t e = on.element(), of_heads = s.q_width() + 2 * s.kv_width();
    stream = rows * s.dim * e, heads = rows * of_heads * e, out = rows * s.q_width() * e;
    tile_stream = tile_rows_most * s.dim * e, tile_heads = tile_rows_most * of_heads * e;
    tile_out = tile_rows_most * s.q_width() * e, tile_ffn = tile_rows_most * s.ffn * e;
  }
  int64_t assembled(int64_t bytes) const { return several ? bytes : 0; }

  int64_t rows;
  bool several;
  int64_t tile_rows_most = 0;
  int64_t stream, heads, out;
  int64_t tile_stream, tile_heads, tile_out, tile_ffn;
};

// Bytes of an operator's charges of one kind, without those that are named.
int64_t temporaries(const Part& part, When when, std::initializer_list<std::string_view> without) {
  int64_t bytes = 0;
  for (const Charge& charge : part.charges) {
    if (charge.when == when && std::find(without.begin(), without.end(), charge.what) == without.end()) {
      bytes += charge.bytes;
    }
  }
  return bytes;
}

}  // namespace

std::vector<Part> decoder_layer_charges(const ModelShape& s, int64_t batch, int64_t length, const Computes& on,
                                        bool recompute, bool with_delta, AttentionCharges attention,
                                        const LayerPlaces& places) {
  const Sizes z(s, batch, length, on);
  const int64_t e = on.element(), wide = on.wide(), t = z.tile_rows_most;
  const int64_t of_heads = s.q_width() + 2 * s.kv_width();
  const int64_t ts = z.tile_stream, th = z.tile_heads, tq = z.tile_out, tf = z.tile_ffn;
  // What an operator takes besides its operands and results.
  const Part norm = norm_charges(t, s.dim, /*with_sum=*/true, on),
             rotary = rotary_charges(t, s.heads, s.kv_heads, s.head_dim(), on);
  const Part head_norm = head_norm_charges(t, s.heads, s.kv_heads, s.head_dim(), on);
  const int64_t norm_forward = temporaries(norm, When::kForward, {kNormOperands});
  const int64_t norm_backward = temporaries(norm, When::kBackward, {kGivenGradient, kNormGradients});
  const int64_t heads_forward = s.qk_norm ? temporaries(head_norm, When::kForward, {"result"}) : 0;
  const int64_t heads_backward =
      s.qk_norm ? temporaries(head_norm, When::kBackward, {kGivenGradient, kProjectionGradient}) : 0;
  const int64_t rotary_forward = temporaries(rotary, When::kForward, {kRotaryOperands});
  const int64_t rotary_backward = temporaries(rotary, When::kBackward, {kGivenGradient, kProjectionGradient});
  const int64_t glu_backward = on.single_passes() ? 0 : tf;
  // Norms of what is added to the residual stream: an input of each is kept, and loops copy it as its sum.
  const int64_t tp = s.post_norms ? ts : 0;
  const int64_t post_norm = s.post_norms ? (on.loops() ? 2 : 1) * ts + norm_forward : 0;
  // Sums of the weights' gradients in the wider dtype, and a product that is not added to them in place.
  const bool apart = z.several && e != wide;
  const int64_t of_product = apart && !on.gpu ? wide : 0;
  const auto widened = [&](int64_t elements) { return apart && !on.gpu ? wide * elements : 0; };
  const int64_t mlp_sums = apart ? wide * (3 * s.ffn * s.dim + s.dim * s.q_width()) : 0;
  const int64_t heads_sums = apart ? wide * of_heads * s.dim : 0;
  const int64_t statistics = z.rows * wide, head_statistics = s.qk_norm ? z.rows * (s.heads + s.kv_heads) * wide : 0;
  const int64_t td = attention.divided ? tq : 0;

  const Charge given_gradient{"gradient of the layer's output", z.stream, When::kBackward};
  const Charge stream_gradient{"gradient of the residual stream", z.stream, When::kBackward};
  const Charge given{"the layer's inputs", (with_delta ? 2 : 0) * z.stream, When::kForward};
  const auto taken = [](int64_t bytes, When when) { return Charge{kWeightsOfPlaces, bytes, when}; };
  const PlaceCharges &first = places.before_attention, &second = places.after_attention;

  // The norm, the projection, the norm of heads, the rotation.
  // Without recomputation, most of what they make is kept.
  const int64_t forward =
      recompute ? z.assembled(z.heads) + std::max({(z.several ? 2 : 1) * ts + norm_forward, ts + th,
                                                   s.qk_norm ? 2 * th + heads_forward : 0, 2 * th + rotary_forward})
                : std::max({norm_forward, s.qk_norm ? th + heads_forward : 0, th + rotary_forward});
  // Backwards: the rotation, the norm of heads, the product, the weight's gradient, the norm.
  const int64_t y = recompute && !z.several ? ts : 0;  // of the norm; a larger one is made again by each tile
  const int64_t y_again = z.several ? ts : 0;
  const int64_t left_of_heads = z.assembled(z.heads), of_qkv = s.qk_norm && recompute ? (z.several ? z.heads : th) : 0;
  const int64_t kept_y = recompute || z.several ? 0 : z.stream;
  const int64_t weight = of_heads * s.dim;
  const int64_t backward = left_of_heads + of_qkv + heads_sums +
                           std::max({y + y_again + (z.several ? th : 2 * th) + rotary_backward,
                                     y + y_again + (s.qk_norm ? 2 * th + heads_backward : 0), y + y_again + th + ts,
                                     y + y_again + th + ts + weight * of_product + widened(t * (s.dim + of_heads)),
                                     2 * ts + norm_backward, z.several ? 2 * ts : 0});
  Part to_heads{"projection to heads",
                {{"input", z.stream, When::kKept},
                 {"statistics", recompute ? 0 : statistics + head_statistics, When::kKept},
                 {"normed input", kept_y, When::kKept},
                 {"projection", recompute || !s.qk_norm ? 0 : z.heads, When::kKept},
                 {"q, k and v", recompute ? 0 : z.heads, When::kKept},
                 given,
                 {"operands and results", forward, When::kForward},
                 given_gradient,
                 stream_gradient,
                 {"statistics", recompute ? statistics + head_statistics : 0, When::kBackward},
                 {"operands and results", backward, When::kBackward},
                 taken(first.forward, When::kForward),
                 taken(first.backward, When::kBackward)}};
  std::vector<Charge>& of_attention = attention.part.charges;
  of_attention.push_back(given);
  of_attention.push_back({"q, k and v", recompute ? z.heads : 0, When::kForward});
  of_attention.push_back(given_gradient);
  of_attention.push_back(stream_gradient);
  of_attention.push_back({"q, k and v", recompute ? z.heads : 0, When::kBackward});
  of_attention.push_back(
      {"normed input, projection", recompute ? y + of_qkv + statistics + head_statistics : 0, When::kBackward});
  of_attention.push_back({"gradient of the output", z.out, When::kBackward});
  of_attention.push_back(taken(first.after, When::kForward));
  of_attention.push_back(taken(first.backward, When::kBackward));

  Part again{"q, k and v again", {}};
  if (recompute) {
    again.charges = {given_gradient,
                     stream_gradient,
                     {"gradient of attention's output", z.out, When::kBackward},
                     {"statistics", statistics + head_statistics, When::kBackward},
                     {"operands and results",
                      z.assembled(z.heads) + (z.several ? of_qkv : 0) +
                          std::max({2 * ts + norm_forward, ts + th, y + (s.qk_norm ? 2 * th + heads_forward : 0),
                                    y + (s.qk_norm && !z.several ? th : 0) + 2 * th + rotary_forward}),
                      When::kBackward},
                     taken(first.backward, When::kBackward)};
  }

  // The projection of heads, the norm, gate and up, their product, the last projection.
  const int64_t after =
      std::max({td + ts, 3 * ts + norm_forward, 2 * ts + 2 * tf, ts + 3 * tf, ts + tf + ts + post_norm});
  const int64_t mlp_kept = recompute ? 0 : (s.post_norms ? 4 : 2) * z.stream + 3 * z.rows * s.ffn * e;
  const int64_t mlp_statistics = (s.post_norms ? 3 : 1) * statistics;
  const int64_t down = s.ffn * s.dim, gate_up = 2 * s.ffn * s.dim, to_stream = s.dim * s.q_width();
  // The MLP again, and backwards: the product's gradient; the weight's; that of gate and up; of the normed; the
  // weight's; of the norm; of attention's output; the weight's. `made`: of a tile's sum, normed, gate and up, and
  // product, what is still alive; if they are kept, the others are not held any more.
  const int64_t of_tile = 2 * ts + 2 * tp + 3 * tf;
  const auto made = [&](int64_t alive) { return recompute ? alive : alive - of_tile; };
  const auto again_made = [&](int64_t bytes) { return recompute ? bytes : 0; };
  const int64_t back =
      mlp_sums + z.assembled(z.stream + z.out) +
      std::max({again_made(td + 3 * ts + tp + norm_forward), again_made(of_tile + post_norm), made(of_tile),
                s.post_norms ? made(of_tile) + ts + norm_backward : 0, made(of_tile - tp) + tp + tf,
                made(of_tile - tp) + tp + tf + down * of_product + widened(t * (s.dim + s.ffn)),
                made(2 * ts + tp + 2 * tf) + 3 * tf + glu_backward, made(2 * ts + tp) + 2 * tf + ts,
                made(2 * ts + tp) + 2 * tf + ts + gate_up * of_product + widened(t * (s.dim + 2 * s.ffn)),
                made(ts + tp) + 2 * ts + norm_backward, made(0) + ts + tp + tq + td,
                made(0) + ts + tp + tq + td + to_stream * of_product + widened(t * (s.dim + s.q_width()))});
  Part mlp{"MLP",
           {{"operands of norm and products", mlp_kept, When::kKept},
            {"statistics", recompute ? 0 : mlp_statistics, When::kKept},
            given,
            {"operands and results", recompute ? z.assembled(2 * z.stream) + after : td + 2 * ts + norm_forward,
             When::kForward},
            given_gradient,
            {"operands and results", back, When::kBackward},
            {kWeightsKept, second.kept, When::kStays},
            taken(second.forward, When::kForward),
            taken(second.backward, When::kBackward)}};
  std::vector<Part> parts;
  const auto end_of = [&](const PlaceCharges& place, int64_t gradients) {
    if (place.ends == 0) return;
    parts.push_back(
        {kSumsOfGradients, {taken(place.ends, When::kBackward), {"gradients of tensors", gradients, When::kBackward}}});
  };
  end_of(first, 2 * z.stream);  // of the layer's output and input
  parts.push_back(std::move(to_heads));
  parts.push_back(std::move(attention.part));
  if (recompute) parts.push_back(std::move(again));
  end_of(second, 2 * z.stream + z.out);  // also of attention's output
  parts.push_back(std::move(mlp));
  return parts;
}

int64_t layer_forward_bytes(const ModelShape& s, int64_t batch, int64_t length, const Computes& on) {
  const Sizes z(s, batch, length, on);
  // While heads are projected and attended: the inputs, their sum, q, k, v and out. In the MLP: the sum, out, and both
  // outputs.
  return std::max(3 * z.stream + z.heads + z.out + z.tile_stream + z.tile_heads,
                  3 * z.stream + z.out + (s.post_norms ? 4 : 2) * z.tile_stream + 3 * z.tile_ffn);
}

}  // namespace annulus
