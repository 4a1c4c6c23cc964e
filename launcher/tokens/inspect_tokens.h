// The work of `tokenize --inspect` and `tokenize --verify` on shards of tokens in any format. Used by
// subcommands/tokenize.cc.
#pragma once

#include <string>

#include "runtime/config/config.h"

namespace annulus {

// In both functions, `path` is a shard or a folder of shards, and `source` describes files that do not describe
// themselves (its `files` are ignored). Both throw Error(kInput) if `path` is not a shard or holds none.

// Prints what the shards hold: format, documents, tokens, tokenizer, a histogram of the documents' lengths, and the
// first tokens, as text if there is a tokens.table beside them.
void inspect_tokens(const std::string& path, const SourceConfig& source);

// Reads everything and compares it with every size, hash and checksum that is stored. Prints what is undamaged.
void verify_tokens(const std::string& path, const SourceConfig& source);

}  // namespace annulus
