// Counts the bytes that LibTorch's CPU allocator hands out. Used by tests, and by `annulus bench`.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace annulus {

// The largest number of bytes allocated at once on this thread while an object of this class is the guarded debug info:
//   const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
// Bytes that another guarded thread frees (a message that it was the last to hold) are subtracted from the thread that
// allocated them.
class PeakBytes : public c10::MemoryReportingInfoBase {
 public:
  PeakBytes() = default;
  ~PeakBytes() override {
    Ledger& all = ledger();
    const std::lock_guard lock(all.mutex);
    std::erase_if(all.taken, [this](const auto& entry) { return entry.second.first == this; });
  }
  PeakBytes(const PeakBytes&) = delete;
  PeakBytes& operator=(const PeakBytes&) = delete;

  void reportMemoryUsage(void* memory, int64_t bytes, size_t, size_t, c10::Device) override {
    Ledger& all = ledger();
    const std::lock_guard lock(all.mutex);
    if (bytes > 0) {
      all.taken[memory] = {this, bytes};
      alive_ += bytes;
      ++allocations_;
      peak_ = std::max(peak_, alive_);
    } else if (const auto found = all.taken.find(memory); found != all.taken.end()) {
      found->second.first->alive_ -= found->second.second;
      all.taken.erase(found);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }
  int64_t alive() const { return alive_; }
  int64_t allocations() const { return allocations_; }  // how often memory was taken

 private:
  struct Ledger {
    std::mutex mutex;
    std::map<void*, std::pair<PeakBytes*, int64_t>> taken;
  };
  static Ledger& ledger() {
    static Ledger ledger;
    return ledger;
  }

  int64_t alive_ = 0, peak_ = 0, allocations_ = 0;
};

}  // namespace annulus
