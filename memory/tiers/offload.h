// Keeps what a forward leaves to its backward away from the device meanwhile: in a file, and on GPUs first in pinned
// host memory, as much of it as that may take. The layers of the model (runtime/model/decoder_layer.cc) put their
// tensors in the order of the forward and take them back in the reverse order; training.cc owns one.
//
// put() returns at once; the tensors leave while the next layer computes (by the threads of transfers.h, on a GPU by
// copies on a stream of their own), and the next put() waits for them. fetch_next() begins to bring back those that
// take() will return next. So at most the tensors of two layers are on the device on their way out or back. Tensors
// come back with the same bits.
//
// The copies to and from a GPU have never run. Not thread safe: forward and backward of a step run one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "memory/tiers/tier_file.h"
#include "memory/tiers/transfers.h"

namespace annulus {

struct OffloadSettings {
  int64_t layers = 0;      // the first `layers` layers are offloaded
  int64_t host_bytes = 0;  // of pinned host memory, on GPUs; what is beyond goes to the file
  at::Device device = at::kCPU;
};

// Makes a tensor for the one with this index among those that were put, not initialised; undefined: as others.
using TierMemory = std::function<at::Tensor(size_t index, at::IntArrayRef sizes, const at::TensorOptions& options)>;

class Offload {
 public:
  // `file` may be null if all fits into host_bytes.
  Offload(const OffloadSettings& settings, std::unique_ptr<TierFile> file);
  ~Offload();
  Offload(const Offload&) = delete;
  Offload& operator=(const Offload&) = delete;

  bool takes(int64_t layer) const;

  // All of these raise the error of an earlier transfer that failed (Error(kResource)).

  // Takes tensors over; undefined ones are allowed. They must not change any more. Returns a ticket for take(). On a
  // CPU the tensors return to what `memory` makes, and otherwise to memory of the pool (memory/pool/pool.h).
  int64_t put(std::vector<at::Tensor> tensors, TierMemory memory = nullptr);
  // Returns when the tensors of the last put() have left the device.
  void settle();
  // Begins to bring back the tensors of the last put() that have not been taken, if there are any. A layer calls it
  // when its backward begins, for the layer below.
  void fetch_next();
  // Returns the tensors of the last put() that have not been taken. Raises Error(kInternal) if `ticket` is another's.
  // They are tensors of their own, also where another rank had lent them (comm/lending.h).
  std::vector<at::Tensor> take(int64_t ticket);
  // Forgets all tensors: those of a forward whose backward did not run.
  void clear();

  OffloadStats stats() const;

  // The bytes that a tensor takes in pinned memory: LibTorch's allocator rounds up to a power of two.
  static int64_t in_pinned_memory(int64_t bytes) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  }

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace annulus
