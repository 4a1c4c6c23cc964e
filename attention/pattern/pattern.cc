// Makes slices from specs; see pattern.h. Dilated attention, block maps, trees, sink tokens and the restrictions have
// files of their own.
#include "attention/pattern/pattern.h"

#include <algorithm>
#include <string_view>
#include <type_traits>
#include <utility>

#include "attention/pattern/checks.h"
#include "attention/pattern/slices.h"
#include "attention/pattern/spec_names.h"
#include "common/checksum.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

// A slice with all pairs of the shape.
Slice whole(const AttentionShape& shape) {
  return {Span::range(0, shape.batch),
          Span::range(0, shape.heads),
          Span::range(0, shape.q_len),
          Span::range(0, shape.k_len),
          {}};
}

// The spec has been validated.
BlockMap block_map_of(const PatternSpec& spec, const AttentionShape& shape) {
  using Map = BlocksSpec::Map;
  const BlocksSpec& blocks = spec.blocks;
  if (blocks.map == Map::kAdaptive) {
    refuse_plan("an adaptive block map is selected from q and k at each call and has no blocks before that");
  }
  if (blocks.map == Map::kFile && !blocks.given) {
    refuse_plan("the block map of " + blocks.file + " has not been read yet; call read_block_maps before planning");
  }
  if (!blocks.given) return named_block_map(blocks, spec.causal, shape);
  // Patterns are compared, by caches and between ranks, by the digests of their maps. The digest must therefore be
  // right.
  if (!blocks.digest.empty() && blocks.digest != blocks.given->digest()) {
    refuse_plan("the block map has the digest " + blocks.given->digest() + ", but its pattern demands " +
                blocks.digest);
  }
  return spec.causal ? without_future(*blocks.given, shape) : *blocks.given;
}

// The mask of a pattern that has one.
const TokenMaskPointer& mask_of(const MaskSpec& mask) {
  if (mask.given) return mask.given;
  refuse_plan(mask.file.empty()
                  ? "no mask has the digest " + mask.digest +
                        " here: a mask that a program made is known by its digest to this process alone, "
                        "for as long as the program keeps it"
                  : "the mask of " + mask.file + " has not been read yet; call read_block_maps before planning");
}

// The slices of a pattern within unions of which `around` is the nearest that has documents; itself if there is none.
std::vector<Slice> slices_of(const PatternSpec& spec, const AttentionShape& shape, const PatternSpec& around,
                             MaskPlanes& masks) {
  const PatternSpec& packed = spec.documents.empty() ? around : spec;
  const bool has_sinks = spec.kind == PatternSpec::Kind::kWindow && spec.sink_tokens > 0;
  std::vector<Slice> slices;
  switch (spec.kind) {
    case PatternSpec::Kind::kFull:
      slices.push_back(whole(shape));
      break;
    case PatternSpec::Kind::kWindow:
      if (has_sinks) {
        append_sinks(spec, packed, shape, slices);
        break;
      }
      slices.push_back(whole(shape));
      if (spec.left != PatternSpec::kOpen) slices.back().band.lo = shape.query_offset - spec.left;
      if (spec.right != PatternSpec::kOpen) slices.back().band.hi = shape.query_offset + spec.right;
      break;
    case PatternSpec::Kind::kDilated:
      append_dilated(spec.dilated, shape, slices);
      break;
    case PatternSpec::Kind::kBlocks:
      append_blocks(block_map_of(spec, shape), shape, slices);
      break;
    case PatternSpec::Kind::kTree:
      append_tree(spec.tree, shape, slices);
      break;
    case PatternSpec::Kind::kUnion:
      for (const PatternSpec& member : spec.members) {
        const std::vector<Slice> part = slices_of(member, shape, packed, masks);
        slices.insert(slices.end(), part.begin(), part.end());
      }
      break;
    case PatternSpec::Kind::kSlices:
      for (Slice slice : spec.slices) {
        slice.batch = slice.batch.clip(0, shape.batch - 1);
        slice.heads = slice.heads.clip(0, shape.heads - 1);
        slices.push_back(slice);
      }
      break;
  }
  if (spec.causal) restrict_to_past(shape, slices);
  if (!spec.mask.empty()) slices = within_mask(mask_of(spec.mask), shape, slices, masks);
  if (!spec.documents.empty() && !has_sinks) slices = within_documents(spec, shape, slices);
  if (!spec.kept_keys.empty()) slices = within_kept_keys(spec, shape, slices);
  std::erase_if(slices, [](const Slice& slice) { return is_empty(slice); });
  return slices;
}

std::vector<Slice> slices_of(const PatternSpec& spec, const AttentionShape& shape, MaskPlanes& masks) {
  return slices_of(spec, shape, spec, masks);
}

// The pattern in which a map that is not known yet is replaced by all keys for each query, and so is a mask without the
// bits of all queries, unless it shows no later key.
PatternSpec with_unknown_maps_full(PatternSpec spec, int64_t query_offset) {
  for (PatternSpec& member : spec.members) member = with_unknown_maps_full(std::move(member), query_offset);
  if (!spec.mask.empty() && (!spec.mask.given || !spec.mask.given->held.all)) {
    if (spec.mask.given && spec.mask.given->farthest <= query_offset) spec.causal = true;
    spec.mask = {};
  }
  const BlocksSpec& blocks = spec.blocks;
  const bool unknown =
      blocks.map == BlocksSpec::Map::kAdaptive || (blocks.map == BlocksSpec::Map::kFile && !blocks.given);
  if (spec.kind == PatternSpec::Kind::kBlocks && unknown) spec.kind = PatternSpec::Kind::kFull;
  return spec;
}

}  // namespace

int64_t output_divisor(const PatternSpec& spec) {
  const bool mean = spec.kind == PatternSpec::Kind::kDilated && spec.dilated.combine == DilatedSpec::Combine::kMean;
  return mean ? static_cast<int64_t>(spec.dilated.segment_lengths.size()) : 1;
}

BlocksSpec given_map(std::shared_ptr<const BlockMap> map) {
  BlocksSpec spec;
  spec.map = BlocksSpec::Map::kGiven;
  spec.block = map->block;
  spec.digest = map->digest();
  spec.given = std::move(map);
  return spec;
}

MaskSpec given_mask(std::shared_ptr<const TokenMask> mask) {
  MaskSpec spec;
  spec.digest = mask->digest;
  spec.given = std::move(mask);
  return spec;
}

int64_t PatternSpec::bytes(bool maps) const {
  auto bytes = static_cast<int64_t>(sizeof *this + slices.size() * sizeof(Slice) +
                                    (dilated.segment_lengths.size() + dilated.dilation_rates.size()) * sizeof(int64_t));
  if (maps && blocks.given) bytes += blocks.given->bytes();
  if (maps && mask.given) bytes += mask.given->bytes();
  for (const auto& row : kept_keys) bytes += static_cast<int64_t>(sizeof row + row.size() * sizeof(Span));
  for (const PatternSpec& member : members) bytes += member.bytes(maps);
  for (const auto* rows : {&documents, &key_documents, &tree.lengths, &tree.parents}) {
    for (const auto& row : *rows) bytes += static_cast<int64_t>(sizeof row + row.size() * sizeof(int64_t));
  }
  return bytes;
}

uint64_t AttentionShape::hash() const {
  static_assert(std::has_unique_object_representations_v<AttentionShape>);
  return hash64(this, sizeof *this);
}

uint64_t PatternSpec::hash() const {
  static_assert(std::has_unique_object_representations_v<Slice>);
  uint64_t hash = 0;
  const auto mix = [&](auto value) { hash = splitmix64(hash ^ static_cast<uint64_t>(value)); };
  const auto mix_all = [&](const auto& values) { mix(hash64(values.data(), values.size() * sizeof *values.data())); };
  mix(kind), mix(causal), mix(left), mix(right), mix(sink_tokens);
  mix_all(dilated.segment_lengths), mix_all(dilated.dilation_rates);
  mix(blocks.map), mix(blocks.block), mix(blocks.window_blocks), mix_all(blocks.digest);
  for (const PatternSpec& member : members) mix(member.hash());
  mix_all(slices);
  for (const auto* rows : {&documents, &key_documents, &tree.lengths, &tree.parents}) {
    for (const std::vector<int64_t>& row : *rows) mix_all(row);
  }
  for (const std::vector<Span>& row : kept_keys) mix_all(row);
  mix_all(mask.digest);
  return hash;
}

bool is_adaptive(const PatternSpec& spec) {
  if (spec.kind == PatternSpec::Kind::kBlocks) return spec.blocks.map == BlocksSpec::Map::kAdaptive;
  return std::ranges::any_of(spec.members, is_adaptive);
}

bool has_mask(const PatternSpec& spec) { return !spec.mask.empty() || std::ranges::any_of(spec.members, has_mask); }

PatternSpec with_causal_members(PatternSpec spec) {
  for (PatternSpec& member : spec.members) {
    member.causal = member.causal || spec.causal;
    member = with_causal_members(std::move(member));
  }
  return spec;
}

Pattern make_pattern(const PatternSpec& spec, const AttentionShape& shape) {
  validate(spec, shape);
  Pattern pattern{shape, {}, {}};
  pattern.slices = slices_of(with_causal_members(spec), shape, pattern.masks);
  return pattern;
}

bool sees_later(const PatternSpec& spec, const AttentionShape& shape) {
  validate(spec, shape);
  if (spec.causal) return false;
  Pattern later{shape, {}, {}};
  later.slices = slices_of(with_unknown_maps_full(with_causal_members(spec), shape.query_offset), shape, later.masks);
  for (Slice& slice : later.slices) slice.band.lo = std::max(slice.band.lo, shape.query_offset + 1);
  return count_pairs(later) > 0;
}

BlockMap make_block_map(const PatternSpec& spec, const AttentionShape& shape) {
  validate(spec, shape);
  if (spec.kind != PatternSpec::Kind::kBlocks) {
    refuse_plan("only a pattern of kind \"blocks\" has a block map, got " + spec.text());
  }
  return block_map_of(spec, shape);
}

}  // namespace annulus
