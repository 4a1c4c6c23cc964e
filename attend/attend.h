// attend: exact attention over the tensors of a safetensors file, by all ranks of a communicator. For checking, and for
// use from anywhere that can write such a file. The verb `attend` (launcher/verb_attend.cc) calls it.
//
// Input: q [B, Sq, H, D]; k and v [B, Sk, Hk, D]; for the backward dout, like q. fp32, fp64, bf16 or fp16, all alike.
// Output: out like q, divided by output_divisor of the pattern; lse [B, H, Sq], fp32 (fp64 for fp64 inputs), -inf for
// rows with no key; dq, dk, dv like q, k, v.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attend/attend_check.h"
#include "attend/random_input.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"
#include "attention/tiles/dropout.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "tensor_files/safetensors.h"

namespace annulus {

// As the user wrote it; texts are checked by AttendJob.
struct AttendOptions {
  std::string input;   // one of these two
  std::string random;  // random_input.h
  std::string output;  // may be empty with `random`
  std::string pattern = "{ kind = \"causal\" }";
  std::optional<std::string> layout;  // default contiguous
  std::string schedule = "auto";
  std::string kernel = "auto";
  bool backward = false;
  std::optional<double> scale;   // default 1 / sqrt(D)
  int64_t query_offset = 0;      // query i has the position i + query_offset
  bool even = false;             // refuse lengths that do not give every rank the same share
  std::vector<int64_t> lengths;  // not empty: contiguous parts of these lengths instead of a layout
  Dropout dropout = {};
  std::string mask_out;  // the block map that was used is written there
  bool check = false;    // compare with the oracle
};

// What can be said of the options without looking at any file. Raises Error(kUsage).
void check_options(const AttendOptions& options);

// A job that has been checked but for its data: every rank comes to the same verdict by itself, so that nothing is sent
// or computed for a job that cannot be.
class AttendJob {
 public:
  // Opens the input and reads its header. Raises Error(kUsage): options; Error(kInput): the file, a tensor that is
  // missing or of the wrong dtype or shape; Error(kPlan): lengths, heads or layout do not fit `ranks`;
  // Error(kResource): the output's folder.
  AttendJob(const AttendOptions& options, int ranks);

  // Everything that must be equal on all ranks.
  std::vector<Field> fields() const;

  // Collective. Each rank reads or makes its own rows and computes on `device`, which the communicator carries; the
  // first one gathers the results and writes the output: whole, or not at all. Prints one line on rank 0, and one with
  // `check`. Raises as attention_forward does, Error(kInput, kResource) from reading and writing, Error(kInput) where
  // `check` is asked for inputs that are not finite, and Error(kInternal) where the results are further from the
  // oracle's than attend_check.h allows.
  void run(Communicator& world, at::Device device = at::kCPU) const;

 private:
  void open_input();
  void check_tensor(const char* name, const char* expected, const std::vector<int64_t>& shape) const;
  void write(const AttendResults& whole, const PatternSpec& pattern) const;
  // The rows that these spans name, or with nullptr all rows.
  RandomTensors inputs(const std::vector<Span>* queries, const std::vector<Span>* keys) const;

  AttendOptions options_;
  KernelKind kernel_ = KernelKind::kAuto;
  PlanRequest request_;
  std::optional<SafetensorsFile> file_;  // or
  std::optional<RandomInput> random_;
  at::ScalarType dtype_ = at::kFloat;
  int64_t head_dim_ = 0;
};

// The command that computes this and compares it with the oracle, for a test that has failed to print. The shape is
// the request's.
std::string attend_command(const PlanRequest& request, const RandomInput& input, KernelKind kernel, bool backward,
                           const Dropout& dropout = {}, double scale = 0);

}  // namespace annulus
