// See batch_reader.h.
#include "runtime/data/batch_reader.h"

#include <chrono>
#include <utility>

#include "common/error.h"

namespace annulus {

Batch fill_batch(const BatchShape& shape, const std::function<Row(int64_t)>& row,
                 const std::function<std::vector<int64_t>(int64_t)>& parts, int64_t* to) {
  Batch batch;
  int64_t* tokens = to;
  int64_t* targets = to + shape.plane();
  int64_t* restarted = targets + shape.plane();
  for (int64_t i = 0; i < shape.own_rows; ++i) {
    const Row whole = row(shape.first_row + i);
    batch.parts.push_back(parts(shape.first_row + i));
    for (const int64_t position : shape.positions) {
      const auto at = static_cast<size_t>(position);
      *tokens++ = whole.tokens[at];
      batch.targets += whole.targets[at] != kNoTarget ? 1 : 0;
      *targets++ = whole.targets[at];
    }
    if (!shape.restart) continue;
    int64_t begin = 0;
    auto part = batch.parts.back().begin();
    for (const int64_t position : shape.positions) {
      while (position >= begin + *part) begin += *part++;
      *restarted++ = position - begin;
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
  for (int64_t i = 0; i < batches_; ++i) {
    const int64_t first = i * shape_.rows;
    to.batches.push_back(fill_batch(
        shape_, [&](int64_t row) { return data_.row(step, first + row); },
        [&](int64_t row) { return data_.parts(step, first + row); }, memory_[to.slot] + i * shape_.values()));
  }
  to.uses = data_.uses(step);
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
