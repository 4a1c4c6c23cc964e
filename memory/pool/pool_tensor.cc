// See pool_tensor.h.
#include "memory/pool/pool_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <array>
#include <cstring>

namespace annulus {
namespace {

// What is taken and returned is reported to LibTorch like the memory of its own allocator, so that its profilers and
// memory/peak_bytes.h see it.
template <PoolPurpose kPurpose>
class PurposeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = Pool::process().get(static_cast<int64_t>(bytes), kPurpose);
    if (memory != nullptr) c10::profiledCPUMemoryReporter().New(memory, bytes);
    return {memory, memory, &return_to_pool, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &return_to_pool; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void return_to_pool(void* memory) {
    if (memory == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(memory);
    Pool::process().put(memory, kPurpose);
  }
};

}  // namespace

c10::Allocator* pool_allocator(PoolPurpose purpose, at::Device device) {
  // Never destroyed, because tensors may be freed at any time during the end of the process.
  static const std::array<c10::Allocator*, kPoolPurposes> all = {
      new PurposeAllocator<PoolPurpose::kTravelling>, new PurposeAllocator<PoolPurpose::kLent>,
      new PurposeAllocator<PoolPurpose::kGradients>,  new PurposeAllocator<PoolPurpose::kScratch>,
      new PurposeAllocator<PoolPurpose::kStaging>,    new PurposeAllocator<PoolPurpose::kSaving>};
  return device.is_cpu() ? all[static_cast<size_t>(purpose)] : nullptr;
}

at::Tensor pool_tensor(at::IntArrayRef sizes, const at::TensorOptions& options, PoolPurpose purpose) {
  c10::Allocator* const allocator = pool_allocator(purpose, options.device());
  if (allocator == nullptr) return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

}  // namespace annulus
