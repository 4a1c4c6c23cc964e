// The places at which a model uses its weights, and what it tells the holder of weights that are not held all the time.
// The model and its layers call the holder; runtime/training/state implements it, and declares the memory that it
// takes. Needs no LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace annulus {

// Place 0 is the embedding. A layer has two places: before attention (its norm, and the projections of q, k and v) and
// after it (attention's output projection and the MLP; in the last layer also the final norm). Neither reads the
// other's weights, also where the backward computes them again, and attention itself reads none. The last place is the
// output. A place uses the unit of parameters of the same number (model_shape.h), except that a tied output uses the
// embedding's.
inline constexpr size_t kEmbeddingPlace = 0;
constexpr size_t place_before_attention(int64_t layer) { return 2 * static_cast<size_t>(layer) + 1; }
constexpr size_t place_after_attention(int64_t layer) { return 2 * static_cast<size_t>(layer) + 2; }
constexpr size_t output_place(int64_t layers) { return 2 * static_cast<size_t>(layers) + 1; }

// Callbacks before a place uses its weights and after it no longer does, in the forward and in the backward. A step
// calls them in the order of the places in the forward, and in the reverse order in the backward.
//
// An exception from a callback propagates out of the model. Callbacks run on the thread that runs the model, or on
// autograd's. The weights of the last place before the output, which the backward needs first, are in use from their
// forward to the end of their backward. The output's, whose gradient the forward computes, and the embedding's are in
// use only in the forward. after_backward is not called for the embedding, with which the backward ends.
class WeightUse {
 public:
  virtual ~WeightUse() = default;
  virtual void before_forward(size_t place) = 0;
  virtual void after_forward(size_t place) = 0;
  virtual void before_backward(size_t place) = 0;
  // The gradients of this place are complete.
  virtual void after_backward(size_t place) = 0;
};

// Bytes that the holder of the weights takes while a place runs, forward and backward.
struct PlaceCharges {
  int64_t forward = 0, backward = 0;
  int64_t after = 0;  // in the forward, between this place and the next
  int64_t kept = 0;   // from its forward to the end of its backward
  int64_t ends = 0;   // at the end of its backward, after the place has released what it computed with
};
inline constexpr std::string_view kWeightsOfPlaces = "weights and gradients that are not there all the time";
inline constexpr std::string_view kWeightsKept = "weights that the backward reads first";
inline constexpr std::string_view kSumsOfGradients = "sums of gradients";  // the part in which a place ends

}  // namespace annulus
