// What sampling needs from a tokenizer's own library: the ids of a prompt, and the bytes of all ids. Used by
// subcommands/sample.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

// Each function starts a process (tokenizer_process.h) and ends it. The process prints its errors to standard error;
// the function then throws ReportedError with its exit code. `tokenizer` is a tokenizer.json or tokenizer.model, or a
// folder with one.

// Encodes `text` as the beginning of a document and returns the ids. For a folder of shards that `annulus tokenize`
// made, the settings of that call apply (begin token, special tokens). Returns {} if a signal has interrupted this
// process (common/interrupt.h).
std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text);

// Makes a new tokens.table (runtime/data/shards/token_table.h) in the folder for temporary files and returns its path.
// The caller must remove it.
std::string make_token_table(const std::string& tokenizer);

}  // namespace annulus
