// What a plan moves and holds: the messages and rows that a rank sends, and the storage that its steps need. The
// execution counts what it really sends and holds (AttentionStats); tests/attention/execution/traffic_test.cc asserts
// that the two agree. Used by `annulus plan`, the memory plan of a training step, the execution and benchmarks.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"
#include "memory/storage.h"

namespace annulus {

// Messages and rows this rank sends in one direction; a row is D elements, each of K and V (or dK and dV). The peak
// counts rows of (K, V) pairs in buffers alive at once, own ones included.
struct Traffic {
  int64_t kv_messages = 0;  // tensors sent: two for each transfer
  int64_t grad_messages = 0;
  int64_t kv_rows = 0;  // K and V are counted once each
  int64_t grad_rows = 0;
  int64_t peak_kv_rows = 0;    // key/value rows alive at once, K and V once each, own rows included
  int64_t peak_grad_rows = 0;  // likewise for gradients

  // For kv elements of `kv_bytes` and gradient elements of `grad_bytes` each.
  int64_t bytes(int64_t head_dim, int64_t kv_bytes, int64_t grad_bytes) const {
    return head_dim * (kv_rows * kv_bytes + grad_rows * grad_bytes);
  }
};
// Of `steps`, one of the program's two directions.
Traffic traffic(const Program& program, const std::vector<Step>& steps);

// The bytes that a program itself takes on the host.
int64_t program_bytes(const Program& program);

// For each buffer, the first and the last of `steps` in which it holds something or is filled; empty if never. Own keys
// and values are the caller's: alive from the first step to the last.
std::vector<Lifetime> lifetimes(const Program& program, const std::vector<Step>& steps);

// The pools of a direction's storage, and their number.
enum StoragePool : int {
  kGivenKV,       // the caller's keys and values, and in the backward those that the forward kept
  kTravellingKV,  // taken for this call, in the inputs' dtype
  kGradients,     // in the accumulator's dtype
  kStoragePools,
};

// What `steps` need, in rows, K and V (or dK and dV) counted once each: the program's buffers by their numbers, and
// after them, in the order in which they are sent, copies of rows that do not lie one after the other in their buffer
// and are copied out to be sent, each alive in its step alone.
Storage storage_of(const Program& program, const std::vector<Step>& steps);

}  // namespace annulus
