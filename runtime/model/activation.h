// The activations of a gated MLP (arXiv 2002.05202), whose product is activation(gate) * up. Used by the model, its
// configuration and its operators. Needs no LibTorch.
#pragma once

namespace annulus {

enum class Activation {
  kSilu,      // x sigmoid(x): SwiGLU
  kGeluTanh,  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: GeGLU, as transformers' gelu_pytorch_tanh
};

// Returns "silu" or "gelu_tanh".
constexpr const char* activation_name(Activation activation) {
  return activation == Activation::kSilu ? "silu" : "gelu_tanh";
}

}  // namespace annulus
