// Lending: ranks of one host pass a tensor on without copying it. A part of Communicator; attention lends the blocks
// that travel (attention/execution/travelling_blocks.cc).
//
// The sender makes the tensor with lendable(), and the receiver passes exchange() a tensor without memory
// (memory/releasable.h). Then both use the same memory, which is freed when neither holds it any more. So once a
// lendable tensor has been sent, it may be freed but must not be changed, except by a rank that received it as the only
// one and holds it alone. A message counts with all its bytes, lent or copied.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

class Lending {
 public:
  // Whether this rank and `peer` lend to each other: they are on one host, and the backend can (threads, and MPI where
  // processes may share memory).
  virtual bool lends_to(int peer) const = 0;
  // A tensor that can be lent, not initialised. A backend that cannot lend returns an ordinary tensor.
  virtual at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) = 0;
  // Whether ranks lend at all; they do by default. Call it with the same value on all ranks, before they communicate. A
  // split inherits it.
  virtual void set_lending(bool lending) = 0;

 protected:
  ~Lending() = default;
};

}  // namespace annulus
