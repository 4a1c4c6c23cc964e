// Compares results of attention with the fp64 oracle (attention/oracle), for `attend --check`. Thread safety: functions
// without state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/dropout/dropout.h"
#include "attention/oracle/oracle.h"
#include "attention/pattern/pattern.h"
#include "attention/pattern/span.h"
#include "runtime/attend/random_input.h"

namespace annulus {

// Raises Error(kUsage) if the problem is too large for the oracle, which loops over all pairs on one core: if the
// number of pairs times the head size exceeds 8e9.
void check_oracle_size(const AttentionShape& shape, int64_t head_dim);

// Raises Error(kInput) for the first element of `inputs` that is not finite, because results could not be compared.
// `where` names the file, or the option that describes the inputs. The spans are the positions of the tensors' rows, by
// default all of them in order.
void require_finite(const RandomTensors& inputs, const std::string& where, const std::vector<Span>* queries = nullptr,
                    const std::vector<Span>* keys = nullptr);

// Raises Error(kUsage) if the bound of errors relative to their terms, for scores of this magnitude, is so large that a
// check would be meaningless.
void require_telling_bound(double scores, double bound, at::ScalarType dtype);

// The results of all ranks together, or those of one rank; dq, dk and dv are undefined if there was no backward.
struct AttendResults {
  at::Tensor out, lse, dq, dk, dv;
  at::Tensor dsinks = {};  // [H]; undefined without sinks or backward
};

// Returns the largest errors, each divided by the largest value of the tensor or 1, those of dq and dk by the largest
// term that may cancel in them: "out 1.2e-07, lse 3.1e-07, dq ...; allowed 1.0e-05, lse 1.0e-05". Raises
// Error(kInternal) with the same text if one exceeds what the rounding of sums, of scores and of the dtype allows
// (attention/oracle/rounding.h). Raises Error(kUsage) if that bound is so large that the check would be meaningless. In
// `pattern`, adaptive maps must have been replaced by those that were used. check_selection()
// is about these.
std::string check_results(const PatternSpec& pattern, const AttentionShape& shape, const RandomTensors& inputs,
                          const AttendResults& results, double scale, const Dropout& dropout,
                          const OracleSoftmax& softmax = {});

// Raises Error(kInternal) unless the maps in `used` are ones that the adaptive maps of `asked` select from q and k, up
// to the order of blocks whose scores differ only by rounding.
void check_selection(const PatternSpec& asked, const PatternSpec& used, const AttentionShape& shape,
                     const RandomTensors& inputs);

}  // namespace annulus
