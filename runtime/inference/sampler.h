// The work of `annulus sample`: continues a prompt with a model from a run's checkpoint or from a folder in Hugging
// Face's layout, in one process on the CPU. Called by launcher/verbs/sample.cc and by tests. Thread safety: one call at
// a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace annulus {

struct SampleOptions {
  std::string run{};                // a run folder, the name of one below `root`, or a folder in Hugging Face's layout
  std::string root = "runs";        // where names of runs are looked up
  std::optional<int64_t> step{};    // the step of the checkpoint; none: the newest undamaged one
  std::string prompt{};             // any bytes, or none
  int64_t tokens = 500;             // the most tokens to write; for a run on text, they are bytes
  double temperature = 0.8;         // 0: always the most likely token
  int64_t top_k = 40;               // choose among this many most likely tokens; 0: all
  double top_p = 1;                 // of these, among the most likely ones whose probabilities add up to this
  std::vector<std::string> stop{};  // strings that end the text and are not shown
  uint64_t seed = 1;                // the same seed gives the same text
  std::string dtype = "fp32";       // the dtype that the model computes in: "fp32", "bf16", "fp64"
  bool terminal = false;            // whether a person reads the text on a terminal
  std::ostream* out = nullptr;      // receives the prompt and the text; null: standard output
  std::ostream* notes = nullptr;    // receives warnings and reports of damaged checkpoints; null: the log
  // Functions that use the tokenizer in a folder, which is that of a run on token shards or one in Hugging Face's
  // layout. `encode` returns the ids of a prompt. `make_table` returns the path of a new tokens.table
  // (runtime/data/shards/token_table.h), which run_sample removes.
  std::function<std::vector<int64_t>(const std::string& folder, const std::string& prompt)> encode{};
  std::function<std::string(const std::string& folder)> make_table{};
};

// Writes the prompt and the text that follows, byte for byte. Returns the exit code: 0, or interrupt_exit_code(). On a
// terminal, bytes that are not UTF-8 and control characters are shown as U+FFFD, and a line break follows the text.
// Tokens are decoded with the table of their tokenizer, which a run on shards keeps
// (run_folder.h) and which is made from a folder's tokenizer. The text ends at the latest where its document ends.
// Throws Error(kInput) if there is no such run or folder, no undamaged checkpoint or none of that step, or no table;
// Error(kUsage) for options out of range; Error(kResource) if the text cannot be written.
int run_sample(const SampleOptions& options);

}  // namespace annulus
