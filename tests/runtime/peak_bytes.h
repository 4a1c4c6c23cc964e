// Counts what LibTorch's CPU allocator hands out.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace annulus {

// Bytes on this thread, at most at once, while it is the guarded debug info:
//   const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
class PeakBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    alive_ += bytes;
    peak_ = std::max(peak_, alive_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }
  int64_t alive() const { return alive_; }

 private:
  int64_t alive_ = 0, peak_ = 0;
};

}  // namespace annulus
