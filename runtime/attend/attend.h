// attend: computes exact attention over the tensors of a safetensors file with all ranks of a communicator. It serves
// to check results, and can be used from any program that writes such a file. The subcommand `attend`
// (launcher/subcommands/attend.cc) calls it.
//
// Input: q [B, Sq, H, D]; k and v [B, Sk, Hk, D]; for the backward dout, with q's shape. All have the same dtype: fp32,
// fp64, bf16 or fp16. With sinks also sinks [H], of any of these dtypes. Output: out with q's shape, divided by the
// pattern's output_divisor; lse [B, H, Sq], fp32 (fp64 for fp64 inputs), -inf for rows without a key or the sink; dq,
// dk and dv with the shapes of q, k and v; dsinks [H], summed over the ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/dropout/dropout.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/hosts.h"
#include "runtime/attend/attend_check.h"
#include "runtime/attend/check_rows.h"
#include "runtime/attend/random_input.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {

// The options as the user wrote them; AttendJob checks the texts.
struct AttendOptions {
  std::string input;   // exactly one of `input` and `random` is given
  std::string random;  // a description as in random_input.h
  std::string output;  // may be empty with `random`
  std::string pattern = "{ kind = \"causal\" }";
  std::optional<std::string> layout;  // default zigzag, as in training; "auto": as choose_layout (choice.h) says
  std::string schedule = "auto";
  int within = 0;       // PlanRequest::within
  std::string machine;  // by which `auto` chooses (find_machine); empty: ANNULUS_MACHINE, or else that of the device
  std::string device = "cpu";  // "cpu" or "cuda", for that
  std::string kernel = "auto";
  bool backward = false;
  std::optional<double> scale;     // default 1 / sqrt(D)
  double softcap = 0;              // a soft cap of scores; 0: none
  bool sinks = false;              // a learned logit for each head: the tensor `sinks` of the input, or drawn
  std::string query_offset = "0";  // query i has the position i + query_offset
  bool even = false;               // refuse lengths that do not give every rank the same share
  std::vector<int64_t> lengths;    // not empty: contiguous parts of these lengths instead of a layout
  Dropout dropout = {};
  std::string trace;       // the file to write a trace of the attention to (comm/gather_trace.h); empty: none
  std::string mask_out;    // the file to write the block map that was used to; empty: none
  bool check = false;      // compare the results with the oracle
  std::string check_rows;  // not empty: compare drawn rows and keys instead, "rows=64,seed=7" (check_rows.h)
};

// What of the ranks a job depends on.
struct AttendRanks {
  RankHosts hosts;                         // of all ranks: Communicator::hosts()
  int64_t free_bytes = 0;                  // for `auto`: what is free on the rank with the least; 0: not known
  std::optional<int> rank = std::nullopt;  // which of them this is
};

// Checks what can be checked without looking at any file. Raises Error(kUsage).
void check_options(const AttendOptions& options);

// A job whose options, shapes and plan request have been checked, but not its data. Every rank reaches the same result
// by itself, so nothing is sent or computed for an impossible job. Not thread-safe.
class AttendJob {
 public:
  // Opens the input and reads its header. Raises Error(kUsage) for wrong options, Error(kInput) for a file that cannot
  // be read or a tensor that is missing or has a wrong dtype or shape, Error(kPlan) if lengths, heads or layout do not
  // fit the ranks, and Error(kResource) if the output's folder cannot be written. Of a mask of tokens a rank holds the
  // bits that it needs (needed_bits), or all if it does not know which rank it is or checks all results. The layout
  // `auto` is chosen here, as if a mask hid nothing.
  AttendJob(const AttendOptions& options, const AttendRanks& ranks);

  // Returns everything that must be equal on all ranks.
  std::vector<Field> fields() const;

  // Collective. Each rank reads or makes its own rows and computes on `device`, whose tensors the communicator must be
  // able to send. Rank 0 gathers the results if they are written or all checked, writes the output atomically and
  // prints one line, another one with `check`, and three with `check_rows`. Raises as attention_forward does,
  // Error(kInput) or Error(kResource) from reading and writing, Error(kInput) with `check` for inputs that are not
  // finite, and Error(kInternal) if the results differ from the oracle's by more than attend_check.h, or check_rows.h,
  // allows.
  void run(Communicator& world, at::Device device = at::kCPU) const;

 private:
  void open_input();
  HeldBits bits_to_read(std::optional<int> rank) const;
  void check_tensor(const char* name, const char* expected, const std::vector<int64_t>& shape) const;
  void write(const AttendResults& whole, const PatternSpec& pattern) const;
  at::Tensor sinks() const;  // undefined without
  // Returns the rows in these spans, or all rows for nullptr, which both are then.
  RandomTensors inputs(const std::vector<Span>* queries, const std::vector<Span>* keys) const;

  AttendOptions options_;
  KernelKind kernel_ = KernelKind::kAuto;
  PlanRequest request_;
  std::string layout_reason_;            // why the layout `auto` is this one; empty for another
  std::string schedule_reason_;          // why `auto` is this schedule, where a mask of tokens is read for it
  std::optional<SafetensorsFile> file_;  // either this
  std::optional<RandomInput> random_;    // or this
  std::optional<RowDraw> draw_;          // which rows are checked, if not all
  at::ScalarType dtype_ = at::kFloat;
  int64_t head_dim_ = 0;
};

// Returns the command that computes this and compares it with the oracle; tests print it when they fail. The shape is
// that of the request.
std::string attend_command(const PlanRequest& request, const RandomInput& input, KernelKind kernel, bool backward,
                           const Dropout& dropout = {}, double scale = 0, double softcap = 0, bool sinks = false);

}  // namespace annulus
