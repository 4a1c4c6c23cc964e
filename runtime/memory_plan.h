// The memory that a training step needs on a rank, worked out from a configuration before any is taken: what the
// trainer prints, and what tests hold against what LibTorch's allocator really hands out.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/config.h"
#include "runtime/layer_requests.h"

namespace annulus {

// Bytes. What lasts from step to step comes first, then what a step takes at most at once.
struct MemoryPlan {
  int64_t weights = 0;      // what is updated and saved
  int64_t gradients = 0;    // reduced, of the same dtype
  int64_t optimizer = 0;    // AdamW's two means
  int64_t leaves = 0;       // copies of weights and gradients in the dtype that the model computes in
  int64_t inputs = 0;       // tokens, targets, the rotary table
  int64_t activations = 0;  // kept by the forward for the backward, all layers
  int64_t loss = 0;         // hidden states, a chunk of logits and the gradients made with it; besides activations
  int64_t layer = 0;        // the backward of a layer's MLP, computed again or not; besides activations
  int64_t attention = 0;    // the backward of a layer's attention, its buffers included; besides activations

  int64_t validation = 0;  // of a GPU whose steps are recorded: their memory is not there for anything else

  // The loss, the last layer's MLP and its attention come one after the other.
  int64_t working() const;
  int64_t total() const;
  // "12.3 GB a rank planned: weights 2.5, ...".
  std::string text() const;
};

// For rank `rank` of the mesh's context axis of `context_ranks`; `layers` of layer_requests() for as many, of the
// global batch. Block maps that are selected at run time are taken as they are counted in
// LayerRequests::pairs_per_token.
MemoryPlan plan_memory(const Config& config, const LayerRequests& layers, int context_ranks, int rank, bool gpu);

}  // namespace annulus
