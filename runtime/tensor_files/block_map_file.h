// Reads the files that patterns name: block masks and masks of tokens. Every rank reads them before planning. Thread
// safety: functions without state.
//
// `{ kind = "blocks", map = "file", file = F }` reads a block mask, and `attend --mask-out F` writes one. It is a
// safetensors file with the tensor "mask", uint8 [batch or 1, heads or 1, query blocks, key blocks], nonzero for active
// blocks. The metadata "block", if present, is the number of tokens in a block: with 128, query block 1 contains the
// queries 128 to 255.
//
// `mask = F` in a pattern of any kind reads a mask of tokens: the tensor "mask", bool or uint8 [batch or 1, heads or 1,
// queries, keys], nonzero for pairs that are seen. It is read 128 rows at a time, and a second time for its bits.
#pragma once

#include <string>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus {

// Returns the pattern with every map = "file" and every mask loaded, also in members of a union: `given` is the file's
// map or mask and `digest` its digest, so ranks that read different files have different texts. A mask holds the bits
// in `held`, by default all. Raises Error(kPlan) if a mask does
// not match the shape or the pattern's block, or shows no pair, Error(kInput) for an unreadable file, a mask of another
// dtype, or a digest that differs from the pattern's, and Error(kResource) as make_token_mask does. All sizes are
// checked before allocation.
PatternSpec read_block_maps(const PatternSpec& spec, const AttentionShape& shape,
                            const HeldBits& held = HeldBits::everything());

// Replaces the file atomically. Raises as write_safetensors does.
void write_block_map(const std::string& path, const BlockMap& map);

}  // namespace annulus
