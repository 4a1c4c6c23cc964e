// The tokenizer of a model whose tokens are bytes, as the files that other programs read: a byte-level BPE without
// merges, in which the id of a byte is its value. Used by export.cc, which writes it, and by model_files.cc, which
// knows it again. Thread safe.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/huggingface/text_ids.h"

namespace annulus {

struct ByteTokenizer {
  std::string tokenizer;  // the text of tokenizer.json
  std::string config;     // the text of tokenizer_config.json
};

// `ids` are those of the model, and `vocab` is its number of ids. Its begin token, and the first of its end tokens,
// become special tokens if they are no bytes (in [256, vocab)). No text gets any of them unless it contains their
// names.
ByteTokenizer byte_tokenizer(const TextIds& ids, int64_t vocab);

// Returns whether this tokenizer.json gives every text its bytes as ids, apart from the names of special tokens with
// ids of 256 and above. False if the file cannot be read or is no tokenizer.json.
bool is_byte_tokenizer(const std::string& path);

}  // namespace annulus
