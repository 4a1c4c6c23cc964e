// Attention by name: the class names of dilated-attention-pytorch, and `auto`. A name stands for a pattern and a
// schedule of the same exact attention; docs/modules.md has the table, which says what the class of that name did
// differently. Used by C++ programs that embed annulus.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/modules/multihead_attention.h"

namespace annulus {

// `auto` treats a sequence as short below the first length and as very long from the second on. There that library's
// own factory went from one device to a ring, and from a ring to block-sparse attention.
constexpr int64_t kLongSequence = 8192;
constexpr int64_t kVeryLongSequence = 65536;

struct AttentionFactoryOptions {
  // Sizes, and everything that a name leaves open. This includes the layout, which says how the caller's rows lie.
  // Names with a pattern of their own take `causal` and documents from attention.pattern; the others (auto, multihead,
  // ring, distributed) compute attention.pattern.
  MultiheadAttentionOptions attention;
  int64_t length = 0;  // positions of the whole sequence, by which auto chooses
  int ranks = 1;
  // For the dilated names. As in that library, branches are combined by their mean.
  DilatedSpec dilated = {.segment_lengths = {2048, 4096, 8192},
                         .dilation_rates = {1, 2, 4},
                         .offsets = DilatedSpec::Offsets::kModulo,
                         .combine = DilatedSpec::Combine::kMean,
                         .equal_segments = false};
  // For the block-sparse names. A name that implies a map replaces `map`.
  BlocksSpec blocks = {};
};

struct AttentionChoice {
  MultiheadAttentionOptions options;
  std::string reason;  // one line: what was chosen, and why
};

// Depends on its arguments alone, so that every rank makes the same choice. Raises Error(kUsage) for an unknown name
// and names the nearest one.
AttentionChoice choose_attention(std::string_view name, const AttentionFactoryOptions& options);

// Makes a module of that choice. `reason`, if not null, receives the choice's reason.
MultiheadAttention make_attention(std::string_view name, const AttentionFactoryOptions& options,
                                  std::string* reason = nullptr);

// The table of names, for documents and tests.
struct NamedAttention {
  std::string_view name;
  std::vector<std::string_view> classes;  // of dilated-attention-pytorch; each of them is also a name
};
const std::vector<NamedAttention>& named_attentions();

}  // namespace annulus
