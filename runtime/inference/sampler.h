// Implements `annulus sample`: continues a prompt with a model from a run's checkpoint or from a folder in Hugging
// Face's layout, on the CPUs of all ranks of a communicator. Used by launcher/subcommands/sample.cc and by tests.
// Thread safety: one call at a time on each rank.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

struct SampleOptions {
  std::string run{};                 // a run folder, the name of one below `root`, or a folder in Hugging Face's layout
  std::string root = "runs";         // the folder of named runs
  std::optional<int64_t> step{};     // of the checkpoint; none: the newest intact one
  std::string prompt{};              // any bytes; may be empty
  int64_t tokens = 500;              // maximum number of tokens; bytes for a run on text
  double temperature = 0.8;          // 0: greedy
  int64_t top_k = 40;                // sample among the k most likely tokens; 0: all
  double top_p = 1;                  // nucleus sampling among these
  std::vector<std::string> stop{};   // strings that end the text, not written
  uint64_t seed = 1;                 // equal seeds give equal texts
  std::string dtype = "fp32";        // compute dtype: "fp32", "bf16", "fp64"
  std::string cache = "model";       // dtype of cached keys and values: "fp32", "bf16" or the compute dtype, "model"
  std::optional<int64_t> context{};  // the most tokens that are read at once; none: the longest rows of the training
  std::optional<std::string> layout{};  // how ranks divide a prompt's positions; none: zigzag; may be "auto"
  bool sharded = false;                 // each rank keeps a part of the weights
  double timeout = 300;                 // deadline of each communication, in seconds
  bool terminal = false;                // whether `out` is a terminal
  std::ostream* out = nullptr;          // for the prompt and the text; null: standard output
  std::ostream* notes = nullptr;        // for warnings and damaged checkpoints; null: the log
  // Functions of the tokenizer in a folder: a run's on token shards, or one in Hugging Face's layout. `encode` returns
  // the ids of a prompt. `make_table` returns the path of a new tokens.table (runtime/data/shards/token_table.h), which
  // run_sample removes. They are called on rank 0 alone.
  std::function<std::vector<int64_t>(const std::string& folder, const std::string& prompt)> encode{};
  std::function<std::string(const std::string& folder)> make_table{};
};

// Writes the prompt and its continuation, byte for byte, on rank 0; other ranks write nothing. Returns the exit code:
// 0, or interrupt_exit_code() if any rank was interrupted. On a terminal, bytes that are not UTF-8 and control
// characters become U+FFFD, and a line break follows the text. Tokens are decoded with the table of their tokenizer,
// which a run on shards keeps (run_folder.h) and `make_table` makes for a folder. Generation stops at the end of the
// document. A note at the end says over how many tokens rounding may have decided (Picked), if there are several ranks.
//
// Collective, with equal options on all ranks. `ranks_here` is the number of ranks that share this host's memory. What
// fails on some ranks is raised on all. Raises Error(kInput) if there is no such run, folder, intact checkpoint, step
// or table; Error(kUsage) for options out of range, and for an adaptive pattern over several ranks; Error(kPlan) for a
// pattern that does not fit the context; Error(kResource) if memory is insufficient, before weights are read, or if the
// text cannot be written.
int run_sample(const SampleOptions& options, Communicator& world, int ranks_here);

}  // namespace annulus
