// logits: what a model says of given tokens, by all ranks of a communicator: for checking it against other programs,
// and for use from anywhere that can write a safetensors file. The verb `logits` (launcher/verb_logits.cc) calls it.
//
// Input: tokens [B, S] int64; optionally targets [B, S] int64, of which negative ones do not count.
// Output: logits [B, S, V] (with `last` [B, V], of the last position), fp32; with targets loss [], fp32, the mean over
// those that count; with `backward` the gradient of the loss by every parameter under its name, fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "inference/opened_model.h"
#include "training/layer_requests.h"

namespace annulus {

// As the user wrote it; texts are checked by LogitsJob.
struct LogitsOptions {
  std::string model;            // a run, or a folder in Hugging Face's layout
  std::string root = "runs";    // where names of runs are looked up
  std::optional<int64_t> step;  // of a run's checkpoint
  std::string input, output;
  std::string pattern;  // in place of the model's own, for all layers
  std::string layout = "contiguous";
  std::string schedule = "auto";
  std::string kernel = "auto";
  std::string dtype = "fp32";  // what it computes in: "fp32", "bf16"
  double timeout = 300;        // seconds: deadline of each communication
  bool last = false;
  bool backward = false;
};

// What can be said of the options without looking at any file. Raises Error(kUsage).
void check_options(const LogitsOptions& options);

// A job that has been checked but for its weights: every rank comes to the same verdict by itself.
class LogitsJob {
 public:
  // Reads the model's description and the input. Raises Error(kUsage): options; Error(kInput): the files, a tensor that
  // is missing or of the wrong dtype or shape, a token outside the vocabulary; Error(kPlan): length, heads or layout do
  // not fit `ranks`; Error(kResource): the output's folder.
  LogitsJob(const LogitsOptions& options, int ranks);

  // Everything that must be equal on all ranks.
  std::vector<Field> fields() const;

  // Collective. Every rank holds the whole weights and computes its positions on `device`, which the communicator
  // carries; the first one gathers the results and writes the output: whole, or not at all. Prints one line on rank 0.
  // `ranks_here`: of this host, which its memory is for. Raises Error(kResource) where that does not do, before weights
  // are read.
  void run(Communicator& world, int ranks_here, at::Device device = at::kCPU);

 private:
  void read_input();
  double bytes_of_rank(const Layout& layout, int rank) const;
  void require_memory(const Communicator& world, int ranks_here, at::Device device) const;

  LogitsOptions options_;
  OpenedModel opened_;
  KernelKind kernel_ = KernelKind::kAuto;
  at::Tensor tokens_, targets_;  // [B, S]; targets undefined where there are none
  int64_t counted_ = 0;          // targets that count
  LayerRequests layers_;
};

}  // namespace annulus
