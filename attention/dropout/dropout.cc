// Makes dropout's keys and factors; see dropout.h.
#include "attention/dropout/dropout.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/dropout/draws.h"
#include "common/splitmix64.h"
#include "memory/upload.h"

namespace annulus {

#ifdef ANNULUS_CUDA
void draw_on_cuda(const at::Tensor& kept, const at::Tensor& philox_keys, const Span& queries, const Span& keys,
                  uint64_t threshold);  // dropout_cuda.cc
#endif

uint64_t philox_key(const Dropout& dropout, int64_t batch_row, int64_t head) {
  uint64_t key = splitmix64(dropout.seed);
  for (const int64_t part : {dropout.step, dropout.layer, dropout.first_row + batch_row, dropout.first_head + head}) {
    key = splitmix64(key ^ static_cast<uint64_t>(part));
  }
  return key;
}

uint64_t drop_threshold(const Dropout& dropout) {
  return static_cast<uint64_t>(std::llround(dropout.rate * 4294967296.0));  // the number of 2^32 words that drop a pair
}

namespace {

// Draws on the CPU. T is the dtype of `factors`.
template <typename T>
void draw(const Dropout& dropout, const Span& batch, const Span& heads, const Span& queries, const Span& keys,
          const at::Tensor& factors) {
  T* const data = factors.data_ptr<T>();
  const T kept = static_cast<T>(1 / (1 - dropout.rate));
  const int64_t rows = batch.count * heads.count * queries.count;
  at::parallel_for(0, rows, std::max<int64_t>(1, 8192 / std::max<int64_t>(keys.count, 1)), [&](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const int64_t i = r % queries.count, h = r / queries.count % heads.count, b = r / queries.count / heads.count;
      draw_row<T>(philox_key(dropout, batch.at(b), heads.at(h)), queries.at(i), keys, drop_threshold(dropout), kept,
                  data + r * keys.count);
    }
  });
}

}  // namespace

at::Tensor dropout_factors(const Dropout& dropout, const Span& batch, const Span& heads, const Span& queries,
                           const Span& keys, const at::Tensor& like) {
  const std::vector<int64_t> shape{batch.count, heads.count, queries.count, keys.count};
#ifdef ANNULUS_CUDA
  if (like.is_cuda()) {
    const at::Tensor kept = at::empty(shape, like.options().dtype(at::kByte));
    const at::Tensor philox_keys = at::empty({batch.count, heads.count}, at::TensorOptions().dtype(at::kLong));
    int64_t* key = philox_keys.data_ptr<int64_t>();
    for (int64_t b = 0; b < batch.count; ++b) {
      for (int64_t h = 0; h < heads.count; ++h) {
        *key++ = static_cast<int64_t>(philox_key(dropout, batch.at(b), heads.at(h)));
      }
    }
    draw_on_cuda(kept, upload(philox_keys, like.device()), queries, keys, drop_threshold(dropout));
    return kept.to(like.options()).mul_(1 / (1 - dropout.rate));
  }
#endif
  const bool wide = like.scalar_type() == at::kDouble;
  const at::Tensor factors = at::empty(shape, at::TensorOptions().dtype(wide ? at::kDouble : at::kFloat));
  wide ? draw<double>(dropout, batch, heads, queries, keys, factors)
       : draw<float>(dropout, batch, heads, queries, keys, factors);
  return factors.to(like.options());
}

}  // namespace annulus
