// Moves bytes between memory and a TierFile on threads of its own, through a fixed number of aligned buffers. Used by
// offload.h, for what a forward keeps, and by tiered_tensors.h, for the state of an optimizer.
//
// The first transfer that fails is remembered, later ones are left out, and every wait() and raise() from then on
// raises its error. One thread at a time may call it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/trace/recorder.h"
#include "memory/tiers/tier_file.h"

namespace annulus {

// What has gone to a tier and come back so far.
struct OffloadStats {
  int64_t bytes_out = 0, bytes_back = 0;  // that left the device, and that came back
  int64_t bytes_in_files = 0;             // the part of bytes_out that was written to files
  int64_t most_in_files = 0;              // the most bytes that the file held at once
  double waited = 0;                      // seconds for which calls waited

  OffloadStats& operator+=(const OffloadStats& other);
};

// Counts the time during which it exists.
class CountedWait {
 public:
  explicit CountedWait(OffloadStats& stats) : stats_(stats) {}
  ~CountedWait() { stats_.waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;

 private:
  OffloadStats& stats_;
  const TraceSpan span_{TraceKind::kWait, "wait for tier"};
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

class Transfers {
 public:
  // The buffers through which files are read and written, and the bytes of each.
  static constexpr int64_t kBuffers = 2, kBuffer = int64_t{4} << 20;
  // The bytes that a Transfers allocates.
  static constexpr int64_t kHeld = kBuffers * (kBuffer + TierFile::kBlock);

  explicit Transfers(std::unique_ptr<TierFile> file);
  // Leaves out transfers that have not begun. Memory and batches of those that have must live until it returns.
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // Transfers that are waited for together.
  class Batch {
   public:
    // On a GPU: the copies into the memory that is written, which a thread waits for before it writes.
    const c10::Event* after = nullptr;

   private:
    friend class Transfers;
    int pending_ = 0;
  };
  // Consecutive bytes in memory and in the file. `offset` is a multiple of TierFile::kBlock; the rest of the last block
  // in the file may be overwritten.
  struct Part {
    void* memory = nullptr;
    int64_t offset = 0, bytes = 0;
  };
  enum class Way { kOut, kBack };

  void reserve(int64_t bytes) { file_->reserve(bytes); }
  void begin(Batch& batch, const std::vector<Part>& parts, Way way);
  // Returns when no part of the batch is on its way.
  void wait(Batch& batch);
  void wait_quietly(Batch& batch);  // raises nothing
  void raise();

 private:
  struct Piece {
    Batch* batch;
    Part part;
    Way way;
  };

  void stop();
  void work(const at::Tensor& buffer);
  void carry(const Piece& piece, void* buffer) const;

  const std::unique_ptr<TierFile> file_;
  std::vector<at::Tensor> buffers_;
  std::mutex mutex_;  // of all below, and of Batch::pending_
  std::condition_variable work_, done_;
  std::deque<Piece> waiting_;
  std::exception_ptr failure_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace annulus
