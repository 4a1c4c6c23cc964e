// A prompt as the ids of a tokenizer, by the tokenizer's own library. Used by verb_sample.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

// The ids of a text as the beginning of a document. `tokenizer`: a tokenizer.json or tokenizer.model, a folder with
// one, or one of shards that `annulus tokenize` made, whose settings (begin token, special tokens) then hold. Starts a
// process and waits for it; where a signal has ended it (common/interrupt.h), {}. What it says goes to standard error:
// raises ReportedError with its exit code.
std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text);

}  // namespace annulus
