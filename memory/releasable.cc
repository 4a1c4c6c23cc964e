// See releasable.h.
#include "memory/releasable.h"

#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/accumulate.h>

namespace annulus {

ReleasableTensor::ReleasableTensor(int64_t elements, const at::TensorOptions& options)
    : tensor_(at::empty({elements}, options)), held_(true) {
  release();
}

at::Tensor ReleasableTensor::alias(int64_t begin, at::IntArrayRef shape) const {
  return tensor_.narrow(0, begin, c10::multiply_integers(shape)).view(shape).variable_data();
}

void ReleasableTensor::take() {
  if (held_) return;
  c10::StorageImpl* storage = tensor_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(storage->nbytes()));
  held_ = true;
}

// The size of the storage stays, because views are also made while the tensor has no memory.
void ReleasableTensor::release() {
  if (!held_) return;
  tensor_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor_.device()));
  held_ = false;
}

}  // namespace annulus
