// See order.h.
#include "runtime/data/order.h"

#include <algorithm>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"

namespace annulus {
namespace {

int64_t rows_of(const RowIndex& index) {
  const int64_t rows = index.rows(Split::kTrain);
  if (rows > 0) return rows;
  throw Error(
      ErrorKind::kInput, "data",
      "a source has no row to train on: none of its documents has two tokens, or all are held out; use more text "
      "or a smaller data.validation_fraction");
}

}  // namespace

SourceOrder::SourceOrder(int64_t seed, std::string_view source, std::shared_ptr<const RowIndex> index)
    : seed_(hash64(source.data(), source.size()) ^ static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15) {
  rows_of(*index);
  segments_.push_back({0, 0, false, std::move(index), 0});
}

const SourceOrder::Segment& SourceOrder::segment_of(int64_t draw) const {
  if (draw < 0) throw Error(ErrorKind::kInternal, "data", "a draw before the first");
  const auto after = std::upper_bound(segments_.begin(), segments_.end(), draw,
                                      [](int64_t d, const Segment& segment) { return d < segment.first; });
  return *std::prev(after);
}

// What is left of an epoch after a change has an order of its own.
uint64_t SourceOrder::key(const Segment& segment, int64_t epoch) const {
  const int64_t words[] = {static_cast<int64_t>(seed_), epoch, segment.rest ? segment.first : -1};
  return hash64(words, sizeof words);
}

SourceOrder::Drawn SourceOrder::at(int64_t draw) const {
  const Segment& segment = segment_of(draw);
  const int64_t rows = rows_of(*segment.index), i = draw - segment.first;
  const int64_t epoch = segment.epoch + i / rows;
  return {segment.index.get(), KeyedPermutation(rows, key(segment, epoch)).at(i % rows), epoch};
}

void SourceOrder::change(int64_t draw, std::shared_ptr<const RowIndex> index, const std::string& folder,
                         FileSystem& files) {
  rows_of(*index);
  const Segment before = segment_of(draw);
  const int64_t rows = rows_of(*before.index), drawn = (draw - before.first) % rows;
  const int64_t epoch = before.epoch + (draw - before.first) / rows;
  std::erase_if(segments_, [&](const Segment& segment) { return segment.first >= draw; });
  const bool begun = before.rest || drawn > 0;
  if (before.index->settings().units_are_documents() != index->settings().units_are_documents()) {
    segments_.push_back({draw, begun ? epoch + 1 : epoch, false, std::move(index), 0});
    return;
  }
  std::shared_ptr<const RowIndex> rest;
  if (begun) {
    rest = RowIndex::remaining(*before.index, {key(before, epoch), drawn}, index->settings(), folder, files);
  }
  if (!rest) {
    segments_.push_back({draw, epoch, false, std::move(index), 0});
    return;
  }
  const double done = before.done + (1 - before.done) * static_cast<double>(drawn) / static_cast<double>(rows);
  const int64_t next = draw + rest->rows(Split::kTrain);
  segments_.push_back({draw, epoch, true, std::move(rest), done});
  segments_.push_back({next, epoch + 1, false, std::move(index), 0});
}

double SourceOrder::epochs(int64_t draw) const {
  const Segment& segment = segment_of(draw);
  const int64_t i = draw - segment.first;
  const double share = static_cast<double>(i) / static_cast<double>(rows_of(*segment.index));
  return static_cast<double>(segment.epoch) + segment.done + (1 - segment.done) * share;
}

}  // namespace annulus
