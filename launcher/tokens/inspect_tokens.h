// What `tokenize --inspect` and `--verify` say of shards of tokens in any format. Used by verb_tokenize.cc.
#pragma once

#include <string>

#include "config/config.h"

namespace annulus {

// `path`: a shard, or a folder of shards. `source`: what is said of files without a mark; its `files` are not looked
// at. Both raise Error(kInput) for what is no shard, or has none.

// Prints what the shards hold: format, documents, tokens, tokenizer, a histogram of the documents' lengths, and the
// first tokens, as text where a tokens.table lies beside them.
void inspect_tokens(const std::string& path, const SourceConfig& source);

// Reads everything and compares it with every size, hash and checksum that is stored. Prints what was found whole.
void verify_tokens(const std::string& path, const SourceConfig& source);

}  // namespace annulus
