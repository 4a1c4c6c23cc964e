// Attention by name: the class names of dilated-attention-pytorch, and `auto`. A name stands for a pattern and a
// schedule of the same exact attention; docs/reference/modules.md has the table. Used by C++ programs that embed
// annulus.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/modules/multihead_attention.h"
#include "comm/hosts.h"

namespace annulus {

struct AttentionFactoryOptions {
  // Sizes, layout of the caller's rows, and all that a name leaves open. Names that imply a pattern take `causal` and
  // documents from attention.pattern; the others (auto, multihead, ring, distributed) compute attention.pattern.
  MultiheadAttentionOptions attention;
  int64_t length = 0;  // of the whole sequence, for which auto chooses the schedule with the least predicted time
  int ranks = 1;
  // Whether `auto` chooses the layout as well, by which the caller then cuts rows: that of AttentionChoice::options.
  bool any_layout = false;
  std::optional<RankHosts> hosts = std::nullopt;  // of the ranks (Communicator::hosts), for `auto`; none: the machine's
  // For the dilated names. As in that library, branches are averaged.
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
  std::string reason;  // one line: the choice and why
};

// Resolves a name by its arguments alone, so that every rank makes the same choice. Raises Error(kUsage), which
// suggests the nearest, for an unknown name; for `auto`, what choose_plan raises (attention/plan/choice.h).
AttentionChoice choose_attention(std::string_view name, const AttentionFactoryOptions& options);

// Makes a module of that choice. Sets *reason, if not null, to the choice's reason.
MultiheadAttention make_attention(std::string_view name, const AttentionFactoryOptions& options,
                                  std::string* reason = nullptr);

// The table of names, for documents and tests.
struct NamedAttention {
  std::string_view name;
  std::vector<std::string_view> classes;  // of dilated-attention-pytorch; each of them is also a name
};
const std::vector<NamedAttention>& named_attentions();

}  // namespace annulus
