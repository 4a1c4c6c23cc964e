// Computes a model's logits, loss and gradients for given tokens on all ranks of a communicator, to check the model
// against other programs, or to use it from any program that can write a safetensors file. The verb `logits`
// (launcher/verbs/logits.cc) calls it. It has never run on GPUs.
//
// Input: tokens [B, S] int64; optionally targets [B, S] int64, of which negative ones do not count.
// Output, all fp32 (fp64 if the model computes in fp64): logits [B, S, V], or with `last` [B, V] of the last position;
// with targets loss [], the mean over those that count; with `backward` the gradient of the loss with respect to each
// parameter, under its name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "runtime/config/config.h"
#include "runtime/inference/opened_model.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

// The options as the user wrote them; check_options and LogitsJob check them.
struct LogitsOptions {
  std::string model;            // a run, or a folder in Hugging Face's layout
  std::string root = "runs";    // where names of runs are looked up
  std::optional<int64_t> step;  // the step of a run's checkpoint; none: the newest
  std::string input, output;    // paths
  std::string pattern;          // replaces the model's own patterns in all layers
  std::string layout = "contiguous";
  std::string schedule = "auto";
  std::string kernel = "auto";
  std::string dtype = "fp32";  // the dtype that the model computes in: "fp32", "bf16", "fp64" (on CPUs)
  double timeout = 300;        // the deadline of each communication in seconds
  bool last = false;
  bool backward = false;
};

// Checks the options without reading any file. Throws Error(kUsage), or Error(kResource) if the output's folder cannot
// be written.
void check_options(const LogitsOptions& options);

// A job whose model and input, but not weights, have been checked. Each rank makes one by itself and arrives at the
// same result. Not thread safe.
class LogitsJob {
 public:
  // Reads the model's description and the input. Throws Error(kUsage) for options; Error(kInput) for files, for a
  // tensor that is missing or has the wrong dtype or shape, and for a token outside the vocabulary; Error(kPlan) if
  // length, heads or layout do not fit `ranks`; Error(kResource) for the output's folder.
  LogitsJob(const LogitsOptions& options, int ranks);

  // The fields that must be equal on all ranks.
  std::vector<Field> fields() const;

  // Collective. Every rank holds all weights and computes its positions on `device`, whose tensors `world` must be able
  // to send. Rank 0 gathers the results, writes the output completely or not at all, and prints one line. `ranks_here`
  // is the number of ranks that share this host's memory. Throws Error(kResource) before weights are read if the memory
  // is too small.
  void run(Communicator& world, int ranks_here, at::Device device = at::kCPU);

 private:
  void read_input();
  double bytes_of_rank(int rank, at::Device device) const;
  at::ScalarType dtype() const;  // that the model computes in
  void require_memory(const Communicator& world, int ranks_here, at::Device device) const;

  LogitsOptions options_;
  OpenedModel opened_;
  KernelKind kernel_ = KernelKind::kAuto;
  at::Tensor tokens_, targets_;  // [B, S] int64; targets are undefined if there are none
  int64_t counted_ = 0;          // the number of targets that count
  LayerRequests layers_;
};

}  // namespace annulus
