// The clock and facts of a CPU for device.h. Used by device_cpu.cc and device_cuda.cc.
#pragma once

#include "benchmarks/gpu/device.h"
#include "benchmarks/measure.h"

namespace annulus {

class WallClock final : public DeviceClock {
 public:
  void start() override { begin_ = wall_seconds(); }
  double stop() override { return wall_seconds() - begin_; }

 private:
  double begin_ = 0;
};

inline const DeviceFacts kCpuFacts = {"cpu", "", 0, 0};

}  // namespace annulus
