// See factory.h.
#include "attention/modules/factory.h"

#include <algorithm>
#include <string>
#include <vector>

#include "attention/plan/choice.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

// Whether queries may see less than everything, so that less than everything may have to be sent.
bool is_sparse(const PatternSpec& p) {
  if (!p.documents.empty() || !p.mask.empty()) return true;
  if (p.kind == PatternSpec::Kind::kUnion) return std::all_of(p.members.begin(), p.members.end(), is_sparse);
  return p.kind != PatternSpec::Kind::kFull;
}

// The layout is the caller's, because it says where the rows of x lie. This can only name a better one.
std::string layout_reason(const MultiheadAttentionOptions& o, int ranks) {
  std::string text = "; layout " + std::string(to_string(o.layout)) + " as given";
  if (ranks == 1) return text;
  if (o.pattern.causal && !is_sparse(o.pattern) && o.layout == LayoutKind::kContiguous) {
    text += " (rows laid as zigzag would share a causal pattern's work evenly)";
  }
  if (is_sparse(o.pattern) && o.layout != LayoutKind::kContiguous) {
    text += " (with rows laid as contiguous a sparse pattern would need fewer from other ranks)";
  }
  return text;
}

PatternSpec restricted_like(const PatternSpec& given, PatternSpec::Kind kind) {
  PatternSpec p;
  p.kind = kind;
  p.causal = given.causal;
  p.documents = given.documents;
  p.key_documents = given.key_documents;
  p.kept_keys = given.kept_keys;
  p.mask = given.mask;
  return p;
}

PatternSpec dilated(const AttentionFactoryOptions& o) {
  PatternSpec p = restricted_like(o.attention.pattern, PatternSpec::Kind::kDilated);
  p.dilated = o.dilated;
  return p;
}

PatternSpec blocks(const AttentionFactoryOptions& o) {
  PatternSpec p = restricted_like(o.attention.pattern, PatternSpec::Kind::kBlocks);
  p.blocks = o.blocks;
  return p;
}

PatternSpec hierarchical(const AttentionFactoryOptions& o) {
  PatternSpec p = blocks(o);
  p.blocks.map = BlocksSpec::Map::kHierarchical;
  if (p.blocks.levels.empty()) p.blocks.levels = {{1, 2}, {4, 16}, {16, 64}};
  return p;
}

PatternSpec adaptive(const AttentionFactoryOptions& o) {
  PatternSpec p = blocks(o);
  p.blocks.map = BlocksSpec::Map::kAdaptive;
  return p;
}

PatternSpec as_given(const AttentionFactoryOptions& o) { return o.attention.pattern; }

struct Entry {
  NamedAttention named;
  PatternSpec (*pattern)(const AttentionFactoryOptions&);
  ScheduleKind schedule;
  const char* what;
};

const std::vector<Entry>& entries() {
  static const std::vector<Entry> table = {
      {{"multihead", {"MultiheadAttention"}}, as_given, ScheduleKind::kAuto, "the pattern given"},
      {{"dilated", {"DilatedAttention", "MultiheadDilatedAttention"}},
       dilated,
       ScheduleKind::kAuto,
       "dilated branches"},
      {{"improved", {"ImprovedDilatedAttention", "ImprovedDilatedAttentionV2", "ImprovedMultiheadDilatedAttention"}},
       dilated,
       ScheduleKind::kAuto,
       "dilated branches; the same function as \"dilated\", which has no slower form here"},
      {{"ring", {"RingAttentionCorrectV2"}}, as_given, ScheduleKind::kRing, "the pattern given, over a ring"},
      {{"ring_dilated",
        {"RingDilatedAttentionV2", "RingDilatedAttention", "RingMultiheadDilatedAttention",
         "UnfoldRingDilatedAttention"}},
       dilated,
       ScheduleKind::kRing,
       "dilated branches over a ring"},
      {{"ring_collective", {"RingDilatedAttentionV2Collective"}},
       dilated,
       ScheduleKind::kAllGather,
       "dilated branches; the sampled rows are gathered at once"},
      {{"block_sparse_ring", {"BlockSparseRingDilatedAttention", "BlockSparseRingMultiheadDilatedAttention"}},
       blocks,
       ScheduleKind::kAuto,
       "active blocks over the ranks"},
      {{"block_sparse_ring_distributed", {"BlockSparseRingDistributedDilatedAttention"}},
       blocks,
       ScheduleKind::kGroupCast,
       "active blocks, each row straight to the ranks that need it"},
      {{"distributed", {}},
       as_given,
       ScheduleKind::kGroupCast,
       "the pattern given, each row straight to where it is needed"},
      {{"hierarchical", {}},
       hierarchical,
       ScheduleKind::kAuto,
       "blocks that are dense nearby and coarser farther away"},
      {{"adaptive", {}}, adaptive, ScheduleKind::kAuto, "blocks selected by content"},
  };
  return table;
}

const Entry* find(std::string_view name) {
  for (const Entry& e : entries()) {
    const auto& classes = e.named.classes;
    if (e.named.name == name || std::find(classes.begin(), classes.end(), name) != classes.end()) return &e;
  }
  return nullptr;
}

[[noreturn]] void refuse(std::string_view name) {
  std::vector<std::string> all = {"auto"};
  std::string known = "auto";
  for (const NamedAttention& n : named_attentions()) {
    all.emplace_back(n.name);
    all.insert(all.end(), n.classes.begin(), n.classes.end());
    known += ", " + std::string(n.name);
  }
  throw Error(ErrorKind::kUsage, "modules",
              "unknown attention \"" + std::string(name) + "\"" + did_you_mean(name, all) + " (known: " + known +
                  ", and the class names in docs/reference/modules.md)");
}

// The layout is the caller's, unless any will do. A pattern whose blocks are selected by content has no plan before a
// call, so its calls choose the schedule; the layout is chosen as if the blocks nearest to the diagonal were.
AttentionChoice choose_auto(const AttentionFactoryOptions& o) {
  AttentionChoice choice{o.attention, ""};
  const std::string size = counted(o.length, "position") + " on " + counted(o.ranks, "rank") + ": ";
  const MultiheadAttentionOptions& m = o.attention;
  PlanRequest request;
  request.shape = {.batch = 1,
                   .heads = m.heads,
                   .kv_heads = m.kv_heads == 0 ? m.heads : m.kv_heads,
                   .q_len = o.length,
                   .k_len = o.length,
                   .query_offset = 0};
  request.pattern = m.pattern;
  request.layout = m.layout;
  request.balance_by = m.balance_by;
  request.ranks = o.ranks;
  request.terms = terms_of(m.machine, "machine", "cpu", m.head_dim == 0 ? m.dim / m.heads : m.head_dim, 4);
  if (o.hosts) request.terms = on_hosts(request.terms, *o.hosts);
  std::string layout = layout_reason(m, o.ranks);
  if (o.any_layout) {
    const LayoutChoice chosen = choose_layout(request);
    choice.options.layout = request.layout = chosen.layout;
    layout = "; layout auto: " + chosen.reason;
  }
  if (is_adaptive(m.pattern)) {
    choice.options.schedule = ScheduleKind::kAuto;
    choice.reason = "blocks are selected by content, so each call chooses its schedule";
  } else {
    const PlanChoice chosen = choose_plan(request);
    choice.options.schedule = chosen.request.schedule;
    choice.options.within = chosen.request.within;
    choice.reason = chosen.reason();
  }
  choice.reason = "auto: " + size + choice.reason + layout;
  return choice;
}

}  // namespace

const std::vector<NamedAttention>& named_attentions() {
  static const std::vector<NamedAttention> names = [] {
    std::vector<NamedAttention> all;
    for (const Entry& e : entries()) all.push_back(e.named);
    return all;
  }();
  return names;
}

AttentionChoice choose_attention(std::string_view name, const AttentionFactoryOptions& options) {
  if (name == "auto") return choose_auto(options);
  const Entry* entry = find(name);
  if (entry == nullptr) refuse(name);
  AttentionChoice choice{options.attention, ""};
  choice.options.pattern = entry->pattern(options);
  choice.options.schedule = entry->schedule;
  choice.reason = std::string(name) + ": " + entry->what + layout_reason(choice.options, options.ranks);
  return choice;
}

MultiheadAttention make_attention(std::string_view name, const AttentionFactoryOptions& options, std::string* reason) {
  const AttentionChoice choice = choose_attention(name, options);
  if (reason != nullptr) *reason = choice.reason;
  return MultiheadAttention(choice.options);
}

}  // namespace annulus
