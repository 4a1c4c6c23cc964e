// Holds results of attention against the fp64 oracle (attention/oracle): `attend --check`.
#pragma once

#include <cstdint>
#include <string>

#include "attend/random_input.h"
#include "attention/pattern/pattern.h"
#include "attention/tiles/dropout.h"

namespace annulus {

// Raises Error(kUsage) where the oracle, plain loops over all pairs on one core, would take more than about a minute.
void check_oracle_size(const AttentionShape& shape, int64_t head_dim);

// Raises Error(kInput) for the first element of a tensor of `inputs` that is not finite: nothing can be checked then.
// `where`: the file, or the option that describes them.
void require_finite(const RandomTensors& inputs, const std::string& where);

// Results of all ranks put together; dq, dk and dv undefined where there was no backward.
struct AttendResults {
  at::Tensor out, lse, dq, dk, dv;
};

// "out 1.2e-07, lse 3.1e-07, dq ...; allowed 1e-05": the largest errors, each over the largest value of what is
// compared or 1. Raises Error(kInternal) with the same text where one is beyond what its dtype allows: 1e-10 for fp64,
// 1e-05 for fp32 and every lse, 2e-02 for bf16, 3e-03 for fp16, and what the rounding of the scores adds. Raises
// Error(kUsage) where that is so much that nothing is checked. `pattern` has slices: adaptive maps are those that were
// used.
std::string check_results(const PatternSpec& pattern, const AttentionShape& shape, const RandomTensors& inputs,
                          const AttendResults& results, double scale, const Dropout& dropout);

}  // namespace annulus
