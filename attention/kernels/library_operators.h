// The attention operators of LibTorch and of FlashAttention 3's package as AttentionOperators. Their calling
// conventions follow their sources (LibTorch 2.11); those for GPUs have never run on one. detect.h finds which are
// installed. Used by choose_kernel.cc and detect.cc. The operators have no state and are thread safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/kernels/attention_operator.h"

namespace annulus {

// LibTorch's flash attention on CPUs: fp32 and fp64 (bf16 and fp16 are computed in fp32); unbounded and causal bands.
std::shared_ptr<const AttentionOperator> cpu_flash_operator();

// cuDNN's fused attention: bf16 and fp16; unbounded and causal bands. It makes a plan for each new shape.
std::shared_ptr<const AttentionOperator> cudnn_operator();

// LibTorch's FlashAttention 2: bf16 and fp16; head sizes up to 256; any band.
std::shared_ptr<const AttentionOperator> flash2_operator();

// FlashAttention 3, if its package has registered its operators: bf16 and fp16; head sizes up to 256; any band.
std::shared_ptr<const AttentionOperator> flash3_operator();
// Return the names of the arguments that it passes to flash_attn_3::fwd and bwd. detect.cc checks them, since versions
// of the package differ.
std::vector<std::string> flash3_forward_arguments();
std::vector<std::string> flash3_backward_arguments();

// LibTorch's memory-efficient attention: fp32, bf16 and fp16; any head size; older devices as well; unbounded and
// causal bands. It does not support grouped-query attention, so kv heads are repeated for it.
std::shared_ptr<const AttentionOperator> efficient_operator();

}  // namespace annulus
