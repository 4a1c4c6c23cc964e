// What sampling needs of a tokenizer's own library: a prompt as ids, and the bytes of all ids. Used by verb_sample.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

// Each starts a process and waits for it. What that says goes to standard error: raises ReportedError with its exit
// code. `tokenizer`: a tokenizer.json or tokenizer.model, or a folder with one.

// The ids of a text as the beginning of a document. In a folder of shards that `annulus tokenize` made, its settings
// (begin token, special tokens) hold. Where a signal has ended the process (common/interrupt.h), {}.
std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text);

// The path of a new tokens.table (data/shards/token_table.h), in the folder for temporary files: the caller's to
// remove.
std::string make_token_table(const std::string& tokenizer);

}  // namespace annulus
