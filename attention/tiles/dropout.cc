// See dropout.h.
#include "attention/tiles/dropout.h"

#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/splitmix64.h"
#include "memory/upload.h"

namespace annulus {

#ifdef ANNULUS_CUDA
void draw_on_cuda(const at::Tensor& kept, const at::Tensor& philox_keys, const Span& queries, const Span& keys,
                  uint64_t threshold);  // dropout_cuda.cc
#endif

namespace {

uint64_t philox_key(const Dropout& dropout, int64_t batch_row, int64_t head) {
  uint64_t key = splitmix64(dropout.seed);
  for (const int64_t part : {dropout.step, dropout.layer, batch_row, head}) {
    key = splitmix64(key ^ static_cast<uint64_t>(part));
  }
  return key;
}

// 1 for the pairs that stay, 0 for the others, on the CPU.
void draw(const Dropout& dropout, const Span& batch, const Span& heads, const Span& queries, const Span& keys,
          uint64_t threshold, const at::Tensor& kept) {
  uint8_t* const data = kept.data_ptr<uint8_t>();
  const int64_t rows = batch.count * heads.count * queries.count;
  at::parallel_for(0, rows, std::max<int64_t>(1, 8192 / std::max<int64_t>(keys.count, 1)), [&](int64_t r, int64_t end) {
    for (; r < end; ++r) {
      const int64_t i = r % queries.count, h = r / queries.count % heads.count, b = r / queries.count / heads.count;
      const uint64_t key = philox_key(dropout, dropout.first_row + batch.at(b), heads.at(h));
      const auto query = static_cast<uint64_t>(queries.at(i));
      for (int64_t j = 0; j < keys.count;) {
        const int64_t group = keys.at(j) / 4;
        at::Philox4_32 philox(key, query, static_cast<uint64_t>(group));
        uint32_t words[4];
        for (uint32_t& word : words) word = philox();
        for (; j < keys.count && keys.at(j) / 4 == group; ++j) {
          data[r * keys.count + j] = words[keys.at(j) % 4] < threshold ? 0 : 1;
        }
      }
    }
  });
}

}  // namespace

at::Tensor dropout_factors(const Dropout& dropout, const Span& batch, const Span& heads, const Span& queries,
                           const Span& keys, const at::Tensor& like) {
  const auto threshold = static_cast<uint64_t>(std::llround(dropout.rate * 4294967296.0));  // of 2^32 values
  const std::vector<int64_t> shape{batch.count, heads.count, queries.count, keys.count};
  at::Tensor kept;
#ifdef ANNULUS_CUDA
  if (like.is_cuda()) {
    kept = at::empty(shape, like.options().dtype(at::kByte));
    const at::Tensor philox_keys = at::empty({batch.count, heads.count}, at::TensorOptions().dtype(at::kLong));
    int64_t* key = philox_keys.data_ptr<int64_t>();
    for (int64_t b = 0; b < batch.count; ++b) {
      for (int64_t h = 0; h < heads.count; ++h) {
        *key++ = static_cast<int64_t>(philox_key(dropout, dropout.first_row + batch.at(b), heads.at(h)));
      }
    }
    draw_on_cuda(kept, upload(philox_keys, like.device()), queries, keys, threshold);
  }
#endif
  if (!kept.defined()) {
    kept = at::empty(shape, at::TensorOptions().dtype(at::kByte));
    draw(dropout, batch, heads, queries, keys, threshold, kept);
  }
  return kept.to(like.options()).mul_(1 / (1 - dropout.rate));
}

}  // namespace annulus
