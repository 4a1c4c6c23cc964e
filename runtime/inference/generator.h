// Text generation with a trained model over the ranks of a communicator, with a cache of keys and values of which each
// rank has a part, so that a token costs time proportional to the preceding tokens, and the choice of the next token.
// Used by runtime/inference/sampler.cc. A generator is not thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "comm/communicator.h"
#include "comm/hosts.h"
#include "runtime/inference/kv_cache.h"
#include "runtime/inference/opened_model.h"
#include "runtime/model/fused_ops.h"
#include "runtime/model/model.h"
#include "runtime/model/model_shape.h"

namespace annulus {

// Returns the pattern of each layer, or one for all layers, for texts of up to `context` tokens, with block maps read
// from their files. A run's maps are for a batch, of which a text is row 0. Notes if a query may see later keys. Raises
// Error(kPlan) if a map does not fit, and Error(kInput) for its file.
std::vector<PatternSpec> generation_patterns(const OpenedModel& opened, int64_t context, const OpenedModel::Note& note);

// Returns the layout that `named` names, by default zigzag; for "auto" the one in which the ranks on these hosts are
// predicted to compute a prompt of `context` tokens in the least time, by the ring. `patterns` are those of
// generation_patterns. Raises as parse_layout does.
LayoutKind prompt_layout(const std::optional<std::string>& named, const ModelShape& shape,
                         const std::vector<PatternSpec>& patterns, int64_t context, const Computes& on,
                         const RankHosts& hosts);

// Returns the most bytes that a Generator takes on a rank, besides weights: its cache, and a forward of a prompt of all
// settings.positions.
double generation_bytes(const ModelShape& shape, const std::vector<PatternSpec>& patterns,
                        const CacheSettings& settings, const Computes& on, int ranks);

class Generator {
 public:
  // `model` and `comm`, which carries tensors of the model's device, must outlive this. `patterns`: one for all layers,
  // or one for each, for one batch row (generation_patterns). When settings.context is full, the later half of the
  // tokens is fed again as the beginning of a new context. Raises what KvCache raises.
  //
  // A pattern covers a whole context, of which the text so far is a prefix. Adaptive maps are selected from the text so
  // far; with query = "mean", from the mean of the known part of a query block.
  Generator(const Model& model, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
            Communicator& comm);
  // Appends tokens (at least one, the same on all ranks) and returns the logits of the next token: [vocab], fp32 (fp64
  // for a model in fp64), CPU. Collective.
  at::Tensor feed(const std::vector<int64_t>& tokens);

  // Returns the number of positions in the cache.
  int64_t length() const { return cache_.length(); }
  // Returns the number of those on this rank.
  int64_t own_length() const { return cache_.own_length(); }

  // Returns how far a logit of feed() may be from the one of another correct computation, such as that over another
  // number of ranks. With u, the unit roundoff of the dtype that the model computes in, and c, that of the dtype in
  // which keys and values are cached if it is narrower, otherwise 0:
  //
  //     |l - l'| <= 2 (layers + 1) (16 u + 2 c) max|l|
  //
  // because at most 16 tensors are rounded one after another in a layer (two norms, heads with their rotation, scores,
  // weights, products, sums), and no more outside of layers; each rounding moves what a tensor passes on by at most u
  // of its largest element; keys and values are rounded once more; and two computations are compared. To first order,
  // for operations that do not enlarge relative errors, and sums in which the errors of terms cancel as independent
  // ones do.
  double rounding(const at::Tensor& logits) const;

 private:
  at::Tensor extend(const int64_t* tokens, int64_t n);

  const Model& model_;
  const int64_t context_;
  const at::ScalarType stored_;  // the dtype of cached keys
  Communicator& comm_;
  std::vector<int64_t> tokens_;  // those in the cache
  KvCache cache_;
};

struct Choice {
  double temperature = 1;  // 0: greedy
  int64_t top_k = 0;       // sample among the k largest logits; 0: all
  double top_p = 1;        // nucleus sampling among these (arXiv 1904.09751)
  uint64_t seed = 0;
};
struct Picked {
  int64_t token = 0;
  bool near = false;  // whether logits that are off by `rounding` could have given another token
};
// Samples a token below `limit` from softmax(logits / temperature) over the tokens that top_k and top_p leave; logits
// [vocab]. Draw i is a function of the seed and i. `rounding`: Generator::rounding.
Picked pick(const at::Tensor& logits, int64_t limit, const Choice& choice, int64_t i, double rounding = 0);

// Converts bytes to text for a terminal: complete UTF-8 characters pass; everything else, and control characters except
// newline and tab, become U+FFFD.
class Utf8Stream {
 public:
  // Returns the text completed by this byte.
  std::string push(unsigned char byte);
  // Returns the rest: U+FFFD if a character is incomplete, or "".
  std::string finish();

 private:
  std::string pending_;
  size_t need_ = 0;  // bytes of the pending character
};

}  // namespace annulus
