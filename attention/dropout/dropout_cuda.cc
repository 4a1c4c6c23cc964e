// Draws for dropout_factors on CUDA tensors. Built with --config=cuda; called by dropout.cc.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "attention/dropout/dropout_cuda.h"
#include "attention/pattern/span.h"

namespace annulus {

void draw_on_cuda(const at::Tensor& kept, const at::Tensor& philox_keys, const Span& queries, const Span& keys,
                  uint64_t threshold) {
  const c10::cuda::CUDAGuard guard(kept.device());
  DropoutArguments a;
  a.kept = kept.data_ptr<uint8_t>();
  a.philox_keys = philox_keys.const_data_ptr<int64_t>();
  a.rows = philox_keys.numel(), a.queries = queries.count, a.keys = keys.count;
  a.first_query = queries.begin, a.query_stride = queries.stride;
  a.first_key = keys.begin, a.key_stride = keys.stride;
  a.threshold = threshold;
  C10_CUDA_CHECK(launch_dropout(a, at::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace annulus
