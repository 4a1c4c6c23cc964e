// Makes random inputs of attention from a line of text, for `attend --random` and for tests, whose failures can then be
// repeated with that option. Thread safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/pattern/span.h"

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
// that is not a number or out of range, or more than 2^62 elements in all.
RandomInput parse_random_input(std::string_view text, std::string_view where);

// Returns the known names, each with its default, for --help.
std::string random_input_defaults();

struct RandomTensors {
  at::Tensor q, k, v, dout;  // [batch, positions, heads, dim], as in attention.h
};

// Returns the sinks that `attend --random --sinks` uses, fp32 [heads]: the elements of tensor 4 of magnitude 1, drawn
// as make_random draws.
at::Tensor random_sinks(const RandomInput& input);

// Return normally distributed CPU tensors: of the positions at these spans, one after the other, or of all positions.
//
// The number at a position does not depend on which others are asked for, so each rank of a job makes its own. Element
// number n of tensor t (0: q, 1: k, 2: v, 3: dout), counted through the whole [batch, positions, heads, dim], is drawn
// by Philox 4x32-10 (attention/oracle/draws.h) with the seed as key and (floor(n / 2), t) as counter: of the four words
// the first two are a number u in (0, 1], the others a number w, and element n is sqrt(-2 ln u) times the cosine (n
// even) or sine (n odd) of 2 pi w, times the magnitude (Box and Muller), in fp64 and then rounded to the dtype.
// Mathematical libraries may differ in the last bit of fp64.
RandomTensors make_random(const RandomInput& input, const std::vector<Span>& queries, const std::vector<Span>& keys);
RandomTensors make_random(const RandomInput& input);

}  // namespace annulus
