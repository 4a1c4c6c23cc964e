// Checks prefix trees and makes their slices. Used by checks.cc, pattern.cc, sizes.cc and rollouts.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus {

// Returns one line on why these are not the nodes of trees in depth-first order, and what would be; "" if they are.
std::string tree_fault(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents);

// Appends one slice for each node with tokens of each batch row: its subtree's queries with its own tokens as keys.
// Neighbouring rows with equal trees share their slices. The spec must be valid for the shape.
void append_tree(const TreeSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices);

}  // namespace annulus
