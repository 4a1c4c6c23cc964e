// Writes the canonical text of a pattern, which parse.cc reads back (PatternSpec::text in pattern.h). Defaults are
// written out, so that equal texts still mean equal patterns if a default changes. Values that a kind does not use are
// omitted.
#include <array>

#include "attention/pattern/checks.h"
#include "attention/pattern/pattern.h"
#include "attention/pattern/spec_names.h"
#include "common/text.h"

namespace annulus {
namespace {

template <typename Enum, typename Names>
std::string named(const Names& names, Enum value) {
  return toml_string(names[static_cast<size_t>(value)]);
}

std::string text_of(const DilatedSpec& d) {
  return ", segment_lengths = " + list_text(d.segment_lengths) + ", dilation_rates = " + list_text(d.dilation_rates) +
         ", offsets = " + named(kOffsetsNames, d.offsets) + ", combine = " + named(kCombineNames, d.combine) +
         (d.equal_segments ? ", equal_segments = true" : "");
}

std::string text_of(const BlocksSpec& b) {
  using Map = BlocksSpec::Map;
  std::string text = ", map = " + named(kMapNames, b.map) + ", block = " + str(b.block);
  const std::string window = ", window_blocks = " + str(b.window_blocks);
  switch (b.map) {
    case Map::kLocal:
      return text + window;
    case Map::kDilated:
      return text + window + ", rate = " + str(b.rate);
    case Map::kGlobalLocal:
      return text + ", global_blocks = " + str(b.global_blocks) + window;
    case Map::kBigBird:
      return text + window + ", global_blocks = " + str(b.global_blocks) + ", random_blocks = " + str(b.random_blocks) +
             ", seed = " + str(b.seed) + (b.per_head ? ", per_head = true" : ", per_head = false");
    case Map::kStrided:
      return text + window + ", stride = " + str(b.stride);
    case Map::kHierarchical:
      return text + ", levels = " + list_text(b.levels, [](const BlocksSpec::Level& level) {
               return list_text(std::array{level.stride, level.reach});
             });
    case Map::kAdaptive:
      return text + ", keep = " + str(b.keep) + ", query = " + named(kQueryNames, b.query);
    case Map::kFile:
      text += ", file = " + toml_string(b.file);
      break;
    case Map::kGiven:
      break;
  }
  return b.digest.empty() ? text : text + ", digest = " + toml_string(b.digest);
}

std::string text_of(const Slice& s) {
  const auto span = [](const Span& x) { return list_text(std::array{x.begin, x.stride, x.count}); };
  std::string text = "{ queries = " + span(s.queries) + ", keys = " + span(s.keys);
  if (s.heads != kEverything) text += ", heads = " + span(s.heads);
  if (s.batch != kEverything) text += ", batch = " + span(s.batch);
  if (!s.band.unbounded_below()) text += ", lo = " + str(s.band.lo);
  if (!s.band.unbounded_above()) text += ", hi = " + str(s.band.hi);
  return text + " }";
}

std::string text_of(const std::vector<std::vector<Span>>& rows) {
  const auto ranges = [](const std::vector<Span>& row) {
    return list_text(row, [](const Span& keys) { return list_text(std::array{keys.begin, keys.begin + keys.count}); });
  };
  return rows.size() == 1 ? ranges(rows[0]) : list_text(rows, ranges);
}

std::string text_of(const std::vector<std::vector<int64_t>>& rows) {
  if (rows.size() == 1) return list_text(rows[0]);
  return list_text(rows, [](const std::vector<int64_t>& row) { return list_text(row); });
}

}  // namespace

std::string PatternSpec::text() const {
  std::string text = "{ kind = ";
  // A window that ends with the query is causal by itself, and one without bounds is the kind that it equals.
  const bool past = ends_with_query(*this);
  const bool unbounded = kind == Kind::kWindow && left == kOpen && (past || right == kOpen);
  bool causal_said = false;
  switch (unbounded ? Kind::kFull : kind) {
    case Kind::kFull:
      causal_said = past;
      text += past ? "\"causal\"" : documents.empty() ? "\"full\"" : "\"documents\"";
      break;
    case Kind::kWindow:
      causal_said = right == 0;
      text += "\"window\", left = " + str(left) + ", right = " + str(right);
      if (sink_tokens > 0) text += ", sink_tokens = " + str(sink_tokens);
      break;
    case Kind::kDilated:
      text += "\"dilated\"" + text_of(dilated);
      break;
    case Kind::kBlocks:
      text += "\"blocks\"" + text_of(blocks);
      break;
    case Kind::kTree:
      causal_said = true;  // a tree is causal by itself
      text += "\"tree\", lengths = " + text_of(tree.lengths) + ", parents = " + text_of(tree.parents);
      break;
    case Kind::kUnion:
      text += "\"union\", of = " + list_text(members, [](const PatternSpec& member) { return member.text(); });
      break;
    case Kind::kSlices:
      text += "\"slices\", slices = " + list_text(slices, [](const Slice& slice) { return text_of(slice); });
      break;
  }
  if (causal && !causal_said) text += ", causal = true";
  if (!documents.empty()) text += ", documents = " + text_of(documents);
  if (!key_documents.empty()) text += ", key_documents = " + text_of(key_documents);
  if (!kept_keys.empty()) text += ", kept_keys = " + text_of(kept_keys);
  if (!mask.file.empty()) text += ", mask = " + toml_string(mask.file);
  if (!mask.digest.empty()) text += ", mask_digest = " + toml_string(mask.digest);
  return text + " }";
}

}  // namespace annulus
