// The attention operators of LibTorch and of FlashAttention 3's package, each brought to the form of
// attention_operator.h. What they take and give was read from their sources (LibTorch 2.11); which are there:
// kernels/detect.h. Used by kernels/choose_kernel.cc. Stateless; thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/operators/attention_operator.h"

namespace annulus {

// LibTorch's flash attention on CPU: fp32 and fp64 (bf16 and fp16 in fp32), whole and causal.
std::shared_ptr<const AttentionOperator> cpu_flash_operator();

// cuDNN's fused attention: bf16, fp16; whole and causal; plans each shape.
std::shared_ptr<const AttentionOperator> cudnn_operator();

// FlashAttention 2 as LibTorch carries it: bf16, fp16; head sizes to 256; any band.
std::shared_ptr<const AttentionOperator> flash2_operator();

// FlashAttention 3, where its package has registered its operators: bf16, fp16; head sizes to 256; any band.
std::shared_ptr<const AttentionOperator> flash3_operator();
// The arguments that it gives flash_attn_3::fwd and bwd, by name: versions of the package differ.
std::vector<std::string> flash3_forward_arguments();
std::vector<std::string> flash3_backward_arguments();

// LibTorch's memory-efficient attention: fp32 too, any head size, older devices; whole and causal. It knows no grouped
// heads: kv heads are repeated for it.
std::shared_ptr<const AttentionOperator> efficient_operator();

}  // namespace annulus
