// Block masks in files: what `{ kind = "blocks", map = "file", file = F }` reads and `attend --mask-out F` writes. A
// safetensors file with the tensor "mask", uint8 [batch or 1, heads or 1, query blocks, key blocks], anything but 0
// being active; query block i holds the queries i * block to i * block + block - 1. The metadata "block", if there is
// any, is the tokens of a block. Read by whoever starts a job, on every rank, before anything is planned.
#pragma once

#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

// The pattern with every map = "file" (also in members of a union) read: `given` is the file's map and `digest` its
// digest, so that ranks that read different files have different texts. Raises Error(kPlan): the mask does not fit the
// shape or the pattern's block; Error(kInput): the file, a mask of another dtype, a digest other than the one that the
// pattern demands. All sizes are checked before memory is taken.
PatternSpec read_block_maps(const PatternSpec& spec, const AttentionShape& shape);

// Replaces the file: whole, or not at all. Raises as write_safetensors does.
void write_block_map(const std::string& path, const BlockMap& map);

}  // namespace annulus
