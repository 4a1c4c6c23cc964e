// Computes a model's logits, loss and gradients for given tokens on all ranks of a communicator, to compare the model
// with other implementations, or to use it from any program that can write a safetensors file. Used by the subcommand
// `logits` (launcher/subcommands/logits.cc).
//
// Input: tokens [B, S] int64; optionally targets [B, S] int64, of which negative ones are ignored.
// Output, all fp32 (fp64 if the model computes in fp64): logits [B, S, V], or with `last` [B, V] of the last position;
// with targets loss [], the mean over targets not ignored; with `backward` the gradient of each parameter, under its
// name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "runtime/inference/opened_model.h"
#include "runtime/inference/row_forward.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

// Unchecked options of the user; check_options and LogitsJob validate them.
struct LogitsOptions {
  std::string model;              // a run, or a folder in Hugging Face's layout
  std::string root = "runs";      // the folder of named runs
  std::optional<int64_t> step{};  // of a run's checkpoint; none: the newest
  std::string input, output;      // paths
  RowOptions rows{};
  std::string dtype = "fp32";  // compute dtype: "fp32", "bf16", "fp64" (on CPUs)
  double timeout = 300;        // deadline of each communication, in seconds
  bool last = false;
  bool backward = false;
};

// Validates the options without reading files. Raises Error(kUsage), or Error(kResource) if the output's folder is not
// writable.
void check_options(const LogitsOptions& options);

// A job with validated model and input, before weights are loaded. Each rank makes an equal one without communication.
// Not thread safe.
class LogitsJob {
 public:
  // Reads the model's description and the input. Raises Error(kUsage) for options; Error(kInput) for files, for a
  // missing tensor or one of the wrong dtype or shape, and for a token outside the vocabulary; Error(kPlan) if length,
  // heads or layout are incompatible with `ranks`; Error(kResource) for the output's folder.
  LogitsJob(const LogitsOptions& options, int ranks);

  // Returns the fields that must be equal on all ranks.
  std::vector<Field> fields() const;

  // Collective. Every rank holds all weights and computes its positions on `device`, whose tensors `world` must be able
  // to send. Rank 0 gathers the results, writes the output atomically, and prints one line. `ranks_here` is the number
  // of ranks that share this host's memory. Raises Error(kResource), before weights are read, if memory is
  // insufficient.
  void run(Communicator& world, int ranks_here, at::Device device = at::kCPU);

 private:
  void read_input();
  double bytes_of_rank(const LayerRequests& layers, int rank, at::Device device, bool attends = true) const;
  at::ScalarType dtype() const;  // of the computation
  // Collective. Lets `auto` choose in layers_ by what is free.
  void choose(Communicator& world, int ranks_here, at::Device device);
  double results_of(const Communicator& world) const;
  // `attends`: with what attention and the backward take, not only with the forward of the rest.
  void require_memory(const Communicator& world, int ranks_here, at::Device device, bool attends) const;

  LogitsOptions options_;
  OpenedModel opened_;
  KernelKind kernel_ = KernelKind::kAuto;
  at::Tensor tokens_, targets_;  // [B, S] int64; targets: undefined if absent
  int64_t counted_ = 0;          // targets not ignored
  LayerRequests layers_;
};

}  // namespace annulus
