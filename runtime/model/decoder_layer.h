// One layer of the decoder, forward and backward, over tiles of rows. model.cc puts the layers together.
//
// Projections, norms and the MLP treat every row (token) by itself. They run over tiles of rows, so that no tensor of
// (rows x ffn) exists unless the backward is to have it; only attention needs all rows at once. The layer is one node
// of autograd, whose backward is written out here: it takes what was kept tile by tile, or makes it again.
//
// What a layer keeps for its backward (x is the sum of its inputs, [rows, dim]):
//   without recomputation  x, q, k, v, what attention keeps, and the operands of norms, projections and the MLP
//   with recomputation     x and what attention keeps: its output, lse, the last keys and values that arrived. The
//                          backward projects q, k and v again and runs the MLP again, but never attention.
// With recomputation, what is kept may leave the device meanwhile (memory/tiers/offload.h).
//
// Gradients of weights are added to the leaves' gradients tile by tile, in the order of the tiles. If there are several
// tiles and the weights are bf16 or fp16, they are summed in fp32 first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "attention/modules/rotary.h"
#include "memory/charge.h"
#include "memory/storage_bytes.h"
#include "memory/tiers/offload.h"
#include "runtime/model/decoder_ops.h"
#include "runtime/model/fused_ops.h"
#include "runtime/model/model_shape.h"
#include "runtime/model/weight_use.h"

namespace annulus {

// Tensors that the shape lacks are undefined. The values of a leaf must be held while its place runs, and in the
// backward the gradients, too, if it requires them (weight_use.h).
struct LayerWeights {
  NormWeight attention_norm;         // [dim]
  at::Tensor qkv, qkv_bias;          // [(heads + 2 kv_heads) head_dim, dim]
  NormWeight q_norm, k_norm;         // [head_dim]
  at::Tensor sinks;                  // [heads]
  at::Tensor out, out_bias;          // [dim, heads head_dim]
  NormWeight attention_post_norm;    // [dim], of what attention adds to the residual stream
  NormWeight mlp_norm;               // [dim]
  at::Tensor gate_up, gate_up_bias;  // [2 ffn, dim]
  at::Tensor down, down_bias;        // [dim, ffn]
  NormWeight mlp_post_norm;          // [dim], of what the MLP adds to the residual stream
};

// What a call of attention leaves: its output and whatever else its backward needs.
struct Attended {
  std::vector<at::Tensor> kept;  // first the output, like q; then any others, which may be undefined
  int64_t divisor = 1;           // by which the layer divides the output (output_divisor(pattern))
  // Returns the gradients of q, k, v and the sinks from that of the output. Empty if there is no backward.
  std::function<Heads(const at::Tensor& dout, const Heads& qkv, const std::vector<at::Tensor>& kept)> backward =
      nullptr;
  // Makes the memory to which kept[i] returns from a tier on a CPU; it returns an undefined tensor for any memory.
  TierMemory memory = nullptr;
};
// For q [B, n, heads, D], k and v [B, n, kv_heads, D], all contiguous, and sinks [heads], a copy of the layer's,
// undefined if it has none.
using Attend = std::function<Attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                                      const at::Tensor& sinks)>;

// The rotary tables of a forward, one for each of ModelShape::rotaries().
struct RotaryTables {
  std::vector<RotaryTable> distinct;  // of n positions for all rows of the batch, or of batch * n
  std::vector<size_t> of_layer;       // an index into `distinct`

  const RotaryTable& of(int64_t layer) const { return distinct[of_layer[static_cast<size_t>(layer)]]; }
};

// What the layers of a forward share.
struct LayerSetting {
  ModelShape shape;
  RotaryTables tables;
  int64_t batch = 1;
  bool recompute = false;
  int64_t tile = 0;              // rows of a tile at most
  Offload* offload = nullptr;    // null: what is kept stays; must outlive the backward
  StorageBytes* kept = nullptr;  // to which each layer adds what it keeps where it is, if it keeps anything; or null
  WeightUse* use = nullptr;      // told of both places of a layer; null: nobody is; must outlive the backward
};

// Returns the most rows of a tile, from shape, dtype and device alone: as many as have about kTileBytes (on a GPU) or
// kTileBytesOnCpu of gate and up, or of projected heads, in a multiple of 128.
inline constexpr int64_t kTileBytes = int64_t{256} << 20, kTileBytesOnCpu = int64_t{64} << 20;
int64_t tile_rows(const ModelShape& shape, const Computes& on);

// Runs layer `layer`. The last layer leaves the end of its second place's forward, and the beginning of its backward,
// to the final norm. x and delta [rows, dim], where rows are batch * n; the layer's input is their sum, or x alone if
// delta is undefined. Returns two such tensors, whose sum is the layer's output. Differentiable in x and delta; the
// gradients of the weights are added to the leaves'.
std::vector<at::Tensor> decoder_layer(const LayerSetting& setting, const LayerWeights& weights, int64_t layer,
                                      const Attend& attend, at::Tensor x, at::Tensor delta);

struct AttentionCharges {
  Part part;             // without q, k, v and the gradient of the output (attention/execution/attention_charges.h)
  bool divided = false;  // whether the layer divides the output
};
// What the holder of the weights takes at a layer's places.
struct LayerPlaces {
  PlaceCharges before_attention, after_attention;
};
// Returns the charges of a layer in the order of the forward; q, k and v that the backward makes again are a part of
// their own, without a forward, as are the ends of places (kSumsOfGradients). `with_delta`: the input is a sum.
std::vector<Part> decoder_layer_charges(const ModelShape& shape, int64_t batch, int64_t length, const Computes& on,
                                        bool recompute, bool with_delta, AttentionCharges attention,
                                        const LayerPlaces& places);
// Returns the most bytes that the forward of a layer holds, its input included, if nothing is kept for a backward.
int64_t layer_forward_bytes(const ModelShape& shape, int64_t batch, int64_t length, const Computes& on);

}  // namespace annulus
