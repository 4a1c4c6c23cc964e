// What `annulus sample` does: continues a prompt with a model, from a checkpoint of a run or from a folder in Hugging
// Face's layout, on one rank. Called by the launcher's verb and by tests.
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
  std::string root = "runs";        // where names are looked up
  std::optional<int64_t> step{};    // of the checkpoint; none: the newest that is whole
  std::string prompt{};             // any bytes, also none
  int64_t tokens = 500;             // how many to write at most; of a run on text they are bytes
  double temperature = 0.8;         // 0: always the most likely token
  int64_t top_k = 40;               // 0: all
  double top_p = 1;                 // of these, the most likely ones whose probabilities come to this
  std::vector<std::string> stop{};  // what ends the text, and is not shown
  uint64_t seed = 1;                // the same seed writes the same text
  std::string dtype = "fp32";       // what the model computes in: "fp32", "bf16"
  std::ostream* out = nullptr;      // the prompt and what follows; null: standard output
  std::ostream* notes = nullptr;    // damaged checkpoints passed over, warnings; null: standard error
  // By the tokenizer in a folder, of a run on shards of tokens or in Hugging Face's layout: the ids of a prompt; the
  // path of a new tokens.table (data/shards/token_table.h), which the caller removes.
  std::function<std::vector<int64_t>(const std::string& folder, const std::string& prompt)> encode{};
  std::function<std::string(const std::string& folder)> make_table{};
};

// Returns the exit code: 0, or interrupt_exit_code(). Bytes that are no UTF-8 are shown as U+FFFD. Tokens become text
// by the table of their tokenizer: that of the shards that a run was trained on, which the run keeps (run_folder.h), or
// made of a folder's tokenizer. The text ends with its document. Raises Error(kInput) when there is no such run or
// folder, no whole checkpoint in it or none of that step, or no table; Error(kUsage) for options out of range.
int run_sample(const SampleOptions& options);

}  // namespace annulus
