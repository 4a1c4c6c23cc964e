// Computes from a plan the messages and rows that a rank sends and the storage that its steps need.
// tests/attention/execution/traffic_test.cc asserts that they equal what the executor counts (AttentionStats). Used by
// `annulus plan`, the memory plan and the traffic of a training step, the executor and benchmarks.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"
#include "memory/storage.h"

namespace annulus {

// The messages and rows that a rank sends in one direction (forward or backward). A row has D elements, and the rows of
// K and of V (or dK and dV) are counted separately.
struct Traffic {
  int64_t kv_messages = 0;  // tensors sent: two for each transfer
  int64_t grad_messages = 0;
  int64_t kv_rows = 0;
  int64_t grad_rows = 0;
  int64_t peak_kv_rows = 0;    // the peak of key/value rows held, the rank's own included
  int64_t peak_grad_rows = 0;  // likewise for gradients

  // Returns the bytes sent, with elements of `kv_bytes` (keys and values) and `grad_bytes` (gradients) bytes.
  int64_t bytes(int64_t head_dim, int64_t kv_bytes, int64_t grad_bytes) const {
    return head_dim * (kv_rows * kv_bytes + grad_rows * grad_bytes);
  }
};
// Returns the traffic of `steps`, a reference to program.forward or program.backward.
Traffic traffic(const Program& program, const std::vector<Step>& steps);

// Returns the bytes of host memory that a program occupies.
int64_t program_bytes(const Program& program);

// Returns, for each buffer, the first and the last of `steps` in which it is filled or holds rows; empty if there is
// none. The rank's own keys and values, which the caller owns, live from the first step to the last.
std::vector<Lifetime> lifetimes(const Program& program, const std::vector<Step>& steps);

// The storage pools of a direction, and their number.
enum StoragePool : int {
  kGivenKV,       // the caller's keys and values, and in the backward those saved by the forward
  kTravellingKV,  // keys and values allocated for this call, in the inputs' dtype
  kGradients,     // gradients, in the accumulator's dtype
  kStoragePools,
};

// Returns the storage that `steps` need, in rows of K and of V (or dK and dV), counted separately. The program's
// buffers have their own numbers. They are followed, in the order of the sends, by the packed copies of rows that are
// not contiguous in their buffer; each copy lives only in its step.
Storage storage_of(const Program& program, const std::vector<Step>& steps);

}  // namespace annulus
