// An attention operator that runs on a CPU and takes bands as those of FlashAttention do, which need a GPU. It computes
// them with masks, and checks what composed kernels guarantee to an operator. Used by the tests of composed kernels.
#pragma once

#include <string>
#include <utility>

#include "attention/kernels/attention_operator.h"

namespace annulus::testing {

class MaskedOperator : public AttentionOperator {
 public:
  // Without any_band it takes unbounded and causal bands and prepares shapes, as cuDNN's operator does.
  explicit MaskedOperator(bool any_band, std::string name = "masked") : any_band_(any_band), name_(std::move(name)) {}

  std::string_view name() const override { return name_; }
  bool any_band() const override { return any_band_; }
  bool prepares_shapes() const override { return !any_band_; }
  int64_t backward_bytes(const OperatorSize&) const override { return 0; }

  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override;
  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override;

 private:
  void expect_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band) const;

  const bool any_band_;
  const std::string name_;
};

}  // namespace annulus::testing
