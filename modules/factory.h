// Attention by name: the class names of dilated-attention-pytorch, and `auto`. A name stands for a pattern and a
// schedule of one exact mechanism; docs/modules.md has the table, with what the class of that name computed otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "modules/multihead_attention.h"

namespace annulus {

// `auto` calls a sequence short below the first and very long from the second on: where that library's own factory went
// from one device to a ring, and from a ring to block-sparse attention.
constexpr int64_t kLongSequence = 8192;
constexpr int64_t kVeryLongSequence = 65536;

struct AttentionFactoryOptions {
  // Sizes, and all that a name says nothing about: the layout, too, which says how the caller's rows lie. Names that
  // stand for a pattern of their own take `causal` and documents from attention.pattern; the others (auto, multihead,
  // ring, distributed) compute attention.pattern.
  MultiheadAttentionOptions attention;
  int64_t length = 0;  // positions of the whole sequence: what auto goes by
  int ranks = 1;
  // Of the dilated names. That library combines by mean.
  DilatedSpec dilated = {.segment_lengths = {2048, 4096, 8192},
                         .dilation_rates = {1, 2, 4},
                         .offsets = DilatedSpec::Offsets::kModulo,
                         .combine = DilatedSpec::Combine::kMean,
                         .equal_segments = false};
  // Of the block-sparse names; `map` is the name's own where the name says which.
  BlocksSpec blocks = {};
};

struct AttentionChoice {
  MultiheadAttentionOptions options;
  std::string reason;  // one line: what was taken, and why
};

// Pure: depends on its arguments alone, so every rank comes to the same. Error(kUsage) for an unknown name, naming the
// nearest.
AttentionChoice choose_attention(std::string_view name, const AttentionFactoryOptions& options);

// A module of that choice; `reason`, if given, takes the choice's.
MultiheadAttention make_attention(std::string_view name, const AttentionFactoryOptions& options,
                                  std::string* reason = nullptr);

// The table: for documents and tests.
struct NamedAttention {
  std::string_view name;
  std::vector<std::string_view> classes;  // of dilated-attention-pytorch; any of them is a name, too
};
const std::vector<NamedAttention>& named_attentions();

}  // namespace annulus
