// Vectors that lie in a tier instead of on the device: in a file, or on GPUs in pinned memory of the host. Used for the
// state of an optimizer (runtime/training/state/), which is needed once in a step, one part after another.
//
// A vector is divided into chunks of a fixed number of elements. update() goes over all chunks in order, with three
// sets of chunk buffers on the device: one is being read, one updated, one written. read() and write() reach any
// elements.
//
// The copies to and from a GPU have never run. Not thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "memory/tiers/tier_file.h"
#include "memory/tiers/transfers.h"

namespace annulus {

class TieredTensors {
 public:
  // The elements of a chunk: 16 MiB in fp32, a power of two, to which LibTorch rounds up pinned memory.
  static constexpr int64_t kChunk = int64_t{4} << 20;
  static constexpr int64_t kSlots = 3;  // sets of chunk buffers

  struct Settings {
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;  // that the chunks are updated on
    int64_t chunk = kChunk;        // elements, a multiple of 16; tests choose fewer
  };
  // Without a file the vectors lie in pinned memory; the device must then be a GPU.
  TieredTensors(const Settings& settings, std::unique_ptr<TierFile> file);
  ~TieredTensors();
  TieredTensors(const TieredTensors&) = delete;
  TieredTensors& operator=(const TieredTensors&) = delete;

  // All of these raise the error of an earlier transfer that failed, and their own (Error(kResource)).

  // Adds a vector of zeros and returns its number: 0, 1, ...
  size_t add(int64_t elements);
  at::ScalarType dtype() const;
  int64_t chunk() const;
  int64_t in_host_memory() const;  // bytes of pinned memory that the vectors take

  // Returns elements [begin, begin + count) as a CPU tensor of its own.
  at::Tensor read(size_t vector, int64_t begin, int64_t count);
  // Replaces elements from `begin` on by `from` [n], of any floating-point dtype and device.
  void write(size_t vector, int64_t begin, const at::Tensor& from);

  // Goes over groups of vectors, those of a group together, which have the same length. For each chunk, calls `change`
  // with the group, the chunk's first element, and the chunk [n] of each vector of the group on the device, in whose
  // place the vectors then have what `change` has left there. Returns while the last chunks are still being written.
  using Change = std::function<void(size_t group, int64_t begin, const std::vector<at::Tensor>& chunk)>;
  void update(const std::vector<std::vector<size_t>>& groups, const Change& change);

  // What update() has moved so far.
  OffloadStats stats() const;

  // The bytes that a vector takes in a file, and in pinned memory, with elements of `size` bytes.
  static int64_t in_file(int64_t elements, int64_t size, int64_t chunk = kChunk);
  static int64_t in_pinned_memory(int64_t elements, int64_t size, int64_t chunk = kChunk);
  // The bytes of the chunk buffers for groups of `vectors` vectors, of which the longest has `longest` elements. With a
  // file a GPU's host has as many again.
  static int64_t buffers(int64_t vectors, int64_t longest, int64_t size);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// A vector, or a part of one, that lies in a tensor [n] or, if `tier` is not null, in a tier.
struct PlacedVector {
  at::Tensor tensor = {};
  TieredTensors* tier = nullptr;
  size_t vector = 0;
  int64_t begin = 0, count = 0;  // of the elements in the tier

  int64_t numel() const { return tier != nullptr ? count : tensor.numel(); }
  at::ScalarType scalar_type() const { return tier != nullptr ? tier->dtype() : tensor.scalar_type(); }
  PlacedVector narrow(int64_t first, int64_t n) const;
  // Returns elements [first, first + n) on the CPU, contiguous. They may share memory with the tensor.
  at::Tensor read(int64_t first, int64_t n) const;
  // Replaces elements from `first` on by `from` [n], of any floating-point dtype and device.
  void write(int64_t first, const at::Tensor& from) const;
};

}  // namespace annulus
