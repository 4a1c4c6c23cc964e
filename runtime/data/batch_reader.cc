// See batch_reader.h.
#include "runtime/data/batch_reader.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "common/error.h"

namespace annulus {

int64_t BatchShape::length() const {
  return std::accumulate(positions.begin(), positions.end(), int64_t{0},
                         [](int64_t sum, const Span& span) { return sum + span.count; });
}

Batch fill_batch(const Dataset& data, const BatchShape& shape, std::vector<DrawnRow> rows, int64_t* to) {
  Batch batch{.rows = std::move(rows)};
  const int64_t length = shape.length();
  int64_t* targets = to + shape.plane();
  int64_t* restarted = targets + shape.plane();
  for (const DrawnRow& row : batch.rows) {
    data.read(row, shape.positions, to, targets);
    batch.targets += length - std::count(targets, targets + length, kNoTarget);
    to += length;
    targets += length;
    if (!shape.restart) continue;
    const std::vector<int64_t> parts = row.parts();
    int64_t begin = 0;
    auto part = parts.begin();
    for (const Span& span : shape.positions) {
      for (int64_t i = 0; i < span.count; ++i) {
        while (span.at(i) >= begin + *part) begin += *part++;
        *restarted++ = span.at(i) - begin;
      }
    }
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
      memory_(std::move(slots)),
      slots_(memory_.size()) {
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].slot = i;
  thread_ = std::thread([this] { read(); });
}

BatchReader::~BatchReader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BatchReader::read_step(int64_t step, Step& to) const {
  to.batches.clear();
  to.uses.assign(data_.sources(), {});
  for (int64_t i = 0; i < batches_; ++i) {
    std::vector<DrawnRow> own;
    for (int64_t row = 0; row < shape_.rows; ++row) {
      DrawnRow drawn = data_.drawn(step, i * shape_.rows + row);
      to.uses[drawn.source].add(drawn.use());
      if (row >= shape_.first_row && row < shape_.first_row + shape_.own_rows) own.push_back(std::move(drawn));
    }
    to.batches.push_back(fill_batch(data_, shape_, std::move(own), memory_[to.slot] + i * shape_.values()));
  }
}

void BatchReader::read() {
  const auto slots = static_cast<int64_t>(slots_.size());
  for (int64_t step = begin_; step < end_; ++step) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || filled_ - given_back_ < slots; });
      if (stop_) return;
    }
    try {
      read_step(step, slots_[static_cast<size_t>((step - begin_) % slots)]);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      changed_.notify_all();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      ++filled_;
    }
    changed_.notify_all();
  }
}

const BatchReader::Step& BatchReader::take() {
  if (begin_ + taken_ >= end_) throw Error(ErrorKind::kInternal, "data", "no step is left to be read");
  const auto before = std::chrono::steady_clock::now();
  {
    std::unique_lock lock(mutex_);
    given_back_ = taken_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return filled_ > taken_ || error_; });
    // Steps that were read before the error are still good.
    if (filled_ <= taken_) std::rethrow_exception(error_);
  }
  waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  return slots_[static_cast<size_t>(taken_++ % static_cast<int64_t>(slots_.size()))];
}

}  // namespace annulus
