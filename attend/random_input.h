// Random inputs of attention that a line of text describes: for `attend --random`, and for tests whose failures are
// to be repeated with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "attention/pattern/pattern.h"

namespace annulus {

struct RandomInput {
  int64_t batch = 1;
  int64_t queries = 128;
  int64_t keys = 128;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t dim = 16;  // head size
  at::ScalarType dtype = at::kFloat;
  int64_t seed = 1;
  double magnitude = 1;  // standard deviation of q and k; that of v and dout is 1

  AttentionShape shape(int64_t query_offset = 0) const { return {batch, heads, kv_heads, queries, keys, query_offset}; }
  std::string text() const;  // parse_random_input reads it
};

// "batch=1,queries=128,keys=128,heads=4,kv_heads=2,dim=16,dtype=f32,seed=7"; what is left out is as above, but that
// keys are as many as queries and kv_heads as heads. dtype: f32, f64, bf16, f16. Raises Error(kUsage): an unknown name
// (the nearest is given), a value that is no number or out of range, more than 2^27 elements in all.
RandomInput parse_random_input(std::string_view text, std::string_view where);

// The names that it knows, each with its default: for --help.
std::string random_input_defaults();

struct RandomTensors {
  at::Tensor q, k, v, dout;  // as in attention.h, of all positions
};

// Normally distributed. A function of the description alone: the same in every process of a build.
RandomTensors make_random(const RandomInput& input);

}  // namespace annulus
