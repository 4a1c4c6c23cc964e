// Makes random inputs of attention from a line of text, for `attend --random` and for tests, whose failures can then be
// repeated with that option. Thread safety: functions without state.
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
  std::string text() const;  // the text from which parse_random_input makes the same input
};

// Reads a text such as "batch=1,queries=128,keys=128,heads=4,kv_heads=2,dim=16,dtype=f32,seed=7". What is left out has
// the default above, except that `keys` defaults to `queries` and `kv_heads` to `heads`. dtype is f32, f64, bf16 or
// f16. `where` names the option in errors. Raises Error(kUsage) for an unknown name (with the nearest one), a value
// that is not a number or out of range, or more than 2^27 elements in all.
RandomInput parse_random_input(std::string_view text, std::string_view where);

// Returns the known names, each with its default, for --help.
std::string random_input_defaults();

struct RandomTensors {
  at::Tensor q, k, v, dout;  // [batch, positions, heads, dim] of all positions, as in attention.h
};

// Returns normally distributed CPU tensors that depend only on the description: they are the same in every process of
// a build.
RandomTensors make_random(const RandomInput& input);

}  // namespace annulus
