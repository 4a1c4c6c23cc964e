// See releasable.h.
#include "memory/releasable.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/accumulate.h>

#include <optional>
#include <utility>

namespace annulus {

at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options, c10::Allocator* allocator) {
  at::Tensor tensor =
      allocator == nullptr
          ? at::empty({0}, options)
          : at::Tensor(at::detail::empty_generic({0}, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                 c10::typeMetaToScalarType(options.dtype()), std::nullopt));
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_nbytes(c10::multiply_integers(sizes) * options.dtype().itemsize());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

bool has_memory(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.storage().data() != nullptr; }

void give_memory(const at::Tensor& tensor, c10::DataPtr memory) {
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
}

void give_own_memory(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  give_memory(tensor, storage->allocator()->allocate(storage->nbytes()));
}

ReleasableTensor::ReleasableTensor(int64_t elements, const at::TensorOptions& options, c10::Allocator* allocator)
    : tensor_(tensor_without_memory({elements}, options, allocator)) {}

at::Tensor ReleasableTensor::alias(int64_t begin, at::IntArrayRef shape) const {
  return tensor_.narrow(0, begin, c10::multiply_integers(shape)).view(shape).variable_data();
}

void ReleasableTensor::take() {
  if (!held_) give_own_memory(tensor_);
  held_ = true;
}

// The size of the storage stays, because views are also made while the tensor has no memory.
void ReleasableTensor::release() {
  if (held_) give_memory(tensor_, c10::DataPtr(nullptr, tensor_.device()));
  held_ = false;
}

}  // namespace annulus
