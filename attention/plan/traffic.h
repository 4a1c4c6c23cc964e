// Computes from a plan the messages and rows that a rank sends and the storage that its steps need. The executor counts
// what it really sends and holds (AttentionStats), and tests/attention/execution/traffic_test.cc asserts that the two
// agree. Used by `annulus plan`, the memory plan of a training step, the executor and benchmarks.
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
  int64_t peak_kv_rows = 0;    // the most key/value rows held at once, including the rank's own
  int64_t peak_grad_rows = 0;  // likewise for gradients

  // The bytes sent, if an element of keys and values has `kv_bytes` bytes and one of gradients `grad_bytes`.
  int64_t bytes(int64_t head_dim, int64_t kv_bytes, int64_t grad_bytes) const {
    return head_dim * (kv_rows * kv_bytes + grad_rows * grad_bytes);
  }
};
// The traffic of `steps`, which must be program.forward or program.backward itself, not a copy.
Traffic traffic(const Program& program, const std::vector<Step>& steps);

// The bytes that a program occupies in the host's memory.
int64_t program_bytes(const Program& program);

// For each buffer, the first and the last of `steps` in which it holds something or is filled; empty if there is none.
// The rank's own keys and values belong to the caller and live from the first step to the last.
std::vector<Lifetime> lifetimes(const Program& program, const std::vector<Step>& steps);

// The pools of a direction's storage, and their number.
enum StoragePool : int {
  kGivenKV,       // the caller's keys and values, and in the backward those that the forward kept
  kTravellingKV,  // keys and values allocated for this call, in the inputs' dtype
  kGradients,     // gradients, in the accumulator's dtype
  kStoragePools,
};

// The storage that `steps` need, in rows of K and of V (or dK and dV), counted separately. The program's buffers come
// first, by their numbers. After them, in the order of the sends, come the copies of rows that do not lie one after the
// other in their buffer and are packed before they are sent; each lives in its step alone.
Storage storage_of(const Program& program, const std::vector<Step>& steps);

}  // namespace annulus
