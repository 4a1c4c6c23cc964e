// What `annulus sample` does: continues a prompt with a checkpoint of a run, on one rank. Called by the launcher's
// verb and by tests.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace annulus {

struct SampleOptions {
  std::string run{};              // a run folder, or the name of one below `root`
  std::string root = "runs";      // where names are looked up
  std::optional<int64_t> step{};  // of the checkpoint; none: the newest that is whole
  std::string prompt{};           // any bytes, also none
  int64_t tokens = 500;           // how many to write at most; of a run on text they are bytes
  double temperature = 0.8;       // 0: always the most likely token
  int64_t top_k = 40;             // 0: all
  uint64_t seed = 1;              // the same seed writes the same text
  std::ostream* out = nullptr;    // the prompt and what follows; null: standard output
  std::ostream* notes = nullptr;  // damaged checkpoints passed over, warnings; null: standard error
  // The ids of a prompt by the tokenizer in a folder: of a run on shards of tokens.
  std::function<std::vector<int64_t>(const std::string& folder, const std::string& prompt)> encode{};
};

// Returns the exit code: 0, or interrupt_exit_code(). Bytes that are no UTF-8 are shown as U+FFFD. A run on shards of
// tokens writes text by the table that it keeps of their tokenizer (run_folder.h), until a document ends. Raises
// Error(kInput) when there is no such run, no whole checkpoint in it or none of that step, or no table; Error(kUsage)
// for options out of range.
int run_sample(const SampleOptions& options);

}  // namespace annulus
