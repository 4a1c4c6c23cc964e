// See batch_reader.h.
#include "runtime/data/batch_reader.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "common/error.h"
#include "common/trace/recorder.h"

namespace annulus {

int64_t BatchShape::length() const {
  return std::accumulate(positions.begin(), positions.end(), int64_t{0},
                         [](int64_t sum, const Span& span) { return sum + span.count; });
}

Batch fill_batch(const Dataset& data, const BatchShape& shape, std::vector<DrawnRow> rows, int64_t* to) {
  const TraceSpan span(TraceKind::kData, "read batch", {}, shape.values() * int64_t{sizeof(int64_t)});
  Batch batch{.rows = std::move(rows)};
  const int64_t length = shape.length();
  const std::vector<Span> positions = shape.place ? shape.place(batch.rows) : shape.positions;
  const auto add = [](int64_t sum, const Span& span) { return sum + span.count; };
  if (std::accumulate(positions.begin(), positions.end(), int64_t{0}, add) != length) {
    throw Error(ErrorKind::kInternal, "data", "a batch was placed at another number of positions than its share has");
  }
  int64_t* targets = to + shape.plane();
  int64_t* rotary = targets + shape.plane();
  float* weights = shape.weighs ? reinterpret_cast<float*>(to + (shape.planes() - 1) * shape.plane()) : nullptr;
  for (const DrawnRow& row : batch.rows) {
    data.read(row, positions, to, targets, weights);
    const int64_t counted = length - std::count(targets, targets + length, kNoTarget);
    batch.targets += counted;
    batch.weight += weights == nullptr ? static_cast<double>(counted) : std::accumulate(weights, weights + length, 0.0);
    if (weights != nullptr) weights += length;
    to += length;
    targets += length;
    if (!shape.rotary()) continue;
    const RowParts whole{{row.context}, {-1}};
    const std::vector<int64_t> own = path_positions(shape.restart ? row.parts() : whole, positions);
    rotary = std::copy(own.begin(), own.end(), rotary);
  }
  return batch;
}

BatchReader::BatchReader(const Dataset& data, BatchShape shape, int64_t batches, int64_t begin, int64_t end,
                         std::vector<int64_t*> slots)
    : data_(data),
      shape_(std::move(shape)),
      batches_(batches),
      begin_(begin),
      end_(end),
      next_(begin),
      memory_(std::move(slots)),
      steps_(memory_.size()) {
  for (size_t slot = 0; slot < steps_.size(); ++slot) begin_to_read(begin + static_cast<int64_t>(slot));
}

size_t BatchReader::slot_of(int64_t step) const { return static_cast<size_t>(step - begin_) % memory_.size(); }

void BatchReader::begin_to_read(int64_t step) {
  if (step >= end_) return;
  steps_[slot_of(step)] = std::async(std::launch::async, [this, step, rank = trace_rank()] {
    const TraceThread thread(rank, "data reader");
    return read(step);
  });
}

BatchReader::Step BatchReader::read(int64_t step) const {
  Step read{.batches = {}, .slot = slot_of(step), .uses = std::vector<SourceUse>(data_.sources())};
  for (int64_t i = 0; i < batches_; ++i) {
    std::vector<DrawnRow> own;
    for (int64_t row = 0; row < shape_.rows; ++row) {
      DrawnRow drawn = data_.drawn(step, i * shape_.rows + row);
      read.uses[drawn.source].add(drawn.use());
      if (row >= shape_.first_row && row < shape_.first_row + shape_.own_rows) own.push_back(std::move(drawn));
    }
    read.batches.push_back(fill_batch(data_, shape_, std::move(own), memory_[read.slot] + i * shape_.values()));
  }
  return read;
}

const BatchReader::Step& BatchReader::take() {
  if (next_ >= end_) throw Error(ErrorKind::kInternal, "data", "no step is left to be read");
  const TraceSpan span(TraceKind::kWait, "wait for data");
  const auto before = std::chrono::steady_clock::now();
  if (next_ > begin_) begin_to_read(next_ - 1 + static_cast<int64_t>(steps_.size()));
  taken_ = steps_[slot_of(next_++)].get();
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  return taken_;
}

}  // namespace annulus
