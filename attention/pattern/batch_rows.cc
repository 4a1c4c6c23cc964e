// Cuts a pattern to some rows of the batch (of_batch_rows in pattern.h).
#include <string>
#include <utility>

#include "attention/pattern/pattern.h"
#include "attention/pattern/spec_names.h"
#include "common/checksum.h"

namespace annulus {
namespace {

BlockMap rows_of(const BlockMap& map, int64_t first, int64_t count) {
  const int64_t per_row = map.heads * map.query_blocks;
  const auto offset = [&](int64_t row) { return map.offsets.begin() + row * per_row; };
  BlockMap part{map.block, count, map.heads, map.query_blocks, map.key_blocks, {}, {}};
  part.offsets.assign(offset(first), offset(first + count) + 1);
  const int64_t begin = part.offsets.front(), end = part.offsets.back();
  for (int64_t& x : part.offsets) x -= begin;
  part.runs.assign(map.runs.begin() + begin, map.runs.begin() + end);
  return part;
}

}  // namespace

PatternSpec of_batch_rows(PatternSpec spec, int64_t first, int64_t count) {
  for (PatternSpec& member : spec.members) member = of_batch_rows(std::move(member), first, count);
  for (auto* lists : {&spec.documents, &spec.key_documents, &spec.tree.lengths, &spec.tree.parents}) {
    if (lists->size() > 1) *lists = {lists->begin() + first, lists->begin() + first + count};
  }
  if (spec.kind == PatternSpec::Kind::kBlocks && spec.blocks.given && spec.blocks.given->batch > count) {
    spec.blocks = given_map(std::make_shared<const BlockMap>(rows_of(*spec.blocks.given, first, count)));
  }
  if (spec.kept_keys.size() > 1)
    spec.kept_keys = {spec.kept_keys.begin() + first, spec.kept_keys.begin() + first + count};
  if (spec.mask.given && spec.mask.given->batch > count) {
    spec.mask = given_mask(std::make_shared<const TokenMask>(spec.mask.given->of_batch_rows(first, count)));
  }
  for (Slice& slice : spec.slices) {
    if (slice.batch == kEverything) continue;
    slice.batch = slice.batch.clip(first, first + count - 1);
    slice.batch.begin = slice.batch.empty() ? 0 : slice.batch.begin - first;
  }
  std::erase_if(spec.slices, [](const Slice& slice) { return slice.batch.empty(); });
  return spec;
}

}  // namespace annulus
