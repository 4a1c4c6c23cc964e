// See transfers.h.
#include "memory/tiers/transfers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory/pool/pool_tensor.h"

namespace annulus {

OffloadStats& OffloadStats::operator+=(const OffloadStats& other) {
  bytes_out += other.bytes_out, bytes_back += other.bytes_back;
  bytes_in_files += other.bytes_in_files, most_in_files += other.most_in_files;
  waited += other.waited;
  return *this;
}

Transfers::Transfers(std::unique_ptr<TierFile> file) : file_(std::move(file)) {
  for (int64_t i = 0; i < kBuffers; ++i) {
    buffers_.push_back(pool_tensor({kBuffer + TierFile::kBlock}, at::TensorOptions(at::kByte), PoolPurpose::kStaging));
  }
  try {
    for (const at::Tensor& buffer : buffers_) {
      threads_.emplace_back([this, &buffer, rank = trace_rank()] {
        const TraceThread thread(rank, "tier");
        work(buffer);
      });
    }
  } catch (...) {
    stop();
    throw;
  }
}

Transfers::~Transfers() { stop(); }

void Transfers::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Transfers::begin(Batch& batch, const std::vector<Part>& parts, Way way) {
  {
    const std::lock_guard lock(mutex_);
    for (const Part& part : parts) {
      for (int64_t at = 0; at < part.bytes; at += kBuffer) {
        char* const memory = static_cast<char*>(part.memory) + at;
        waiting_.push_back({&batch, {memory, part.offset + at, std::min(kBuffer, part.bytes - at)}, way});
        ++batch.pending_;
      }
    }
  }
  work_.notify_all();
}

void Transfers::wait(Batch& batch) {
  wait_quietly(batch);
  raise();
}

void Transfers::wait_quietly(Batch& batch) {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return batch.pending_ == 0; });
}

void Transfers::raise() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Transfers::work(const at::Tensor& buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.data_ptr());
  void* const aligned = reinterpret_cast<void*>((address + TierFile::kBlock - 1) / TierFile::kBlock * TierFile::kBlock);
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const Piece piece = waiting_.front();
    waiting_.pop_front();
    if (!failure_ && !stop_) {
      lock.unlock();
      std::exception_ptr failed;
      try {
        carry(piece, aligned);
      } catch (...) {
        failed = std::current_exception();
      }
      lock.lock();
      if (failed && !failure_) failure_ = failed;
    }
    if (--piece.batch->pending_ == 0) done_.notify_all();
  }
}

void Transfers::carry(const Piece& piece, void* buffer) const {
  const auto& [memory, offset, bytes] = piece.part;
  const bool out = piece.way == Way::kOut;
  const TraceSpan span(TraceKind::kTier, out ? TraceName("write to tier") : TraceName("read from tier"), {}, bytes);
  if (out && piece.batch->after != nullptr) piece.batch->after->synchronize();
  if (!file_->direct()) return out ? file_->write(offset, memory, bytes) : file_->read(offset, memory, bytes);
  if (out) {
    std::memcpy(buffer, memory, static_cast<size_t>(bytes));
    file_->write(offset, buffer, TierFile::padded(bytes));
  } else {
    file_->read(offset, buffer, TierFile::padded(bytes));
    std::memcpy(memory, buffer, static_cast<size_t>(bytes));
  }
}

}  // namespace annulus
