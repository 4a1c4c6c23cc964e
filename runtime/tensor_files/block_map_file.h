// Reads and writes files of block masks: `{ kind = "blocks", map = "file", file = F }` reads one, and `attend
// --mask-out F` writes one. It is a safetensors file with the tensor "mask", uint8 [batch or 1, heads or 1, query
// blocks, key blocks], nonzero for active blocks. The metadata "block", if present, is the number of tokens in a block:
// with 128, query block 1 contains the queries 128 to 255. Every rank reads the file before planning. Thread safety:
// functions without state.
#pragma once

#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

// Returns the pattern with every map = "file" loaded, also in members of a union: `given` is the file's map and
// `digest` its digest, so ranks that read different files have different texts. Raises Error(kPlan) if the mask does
// not match the shape or the pattern's block, and Error(kInput) for an unreadable file, a mask of another dtype, or a
// digest that differs from the pattern's. All sizes are checked before allocation.
PatternSpec read_block_maps(const PatternSpec& spec, const AttentionShape& shape);

// Replaces the file atomically. Raises as write_safetensors does.
void write_block_map(const std::string& path, const BlockMap& map);

}  // namespace annulus
