// Computes from a plan the messages and rows that a rank sends and the storage that its steps need.
// tests/attention/execution/traffic_test.cc asserts that they equal what the executor counts (AttentionStats). Used by
// `annulus plan`, the memory plan and the traffic of a training step, the executor and benchmarks.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"
#include "memory/storage.h"

namespace annulus {

// What one row of a buffer holds: vectors of D elements in the inputs' dtype and in the accumulator's, and single
// elements of the accumulator's dtype. Each vector or element is in a tensor of its own, which is one message.
struct RowContent {
  int64_t vectors = 0, wide_vectors = 0, wide_elements = 0;

  int64_t tensors() const { return vectors + wide_vectors + wide_elements; }
  // Returns the bytes of a row, with elements of `bytes` bytes in the inputs' dtype and of `wide` bytes in the
  // accumulator's.
  int64_t bytes(int64_t head_dim, int64_t bytes, int64_t wide) const {
    return head_dim * (vectors * bytes + wide_vectors * wide) + wide_elements * wide;
  }
};
RowContent row_content(BufferKind kind, bool backward);

// The messages and rows that a rank sends in one direction (forward or backward). The rows of K and of V (or dK and dV)
// are counted separately, and have D elements; those of queries and of results have what row_content says.
struct Traffic {
  bool backward = false;
  int64_t kv_messages = 0;  // tensors sent: two for each transfer
  int64_t grad_messages = 0;
  int64_t query_messages = 0, result_messages = 0;
  int64_t kv_rows = 0;
  int64_t grad_rows = 0;
  int64_t query_rows = 0, result_rows = 0;
  int64_t peak_kv_rows = 0;                           // the peak of key/value rows held, the rank's own included
  int64_t peak_grad_rows = 0;                         // likewise for gradients
  int64_t peak_query_rows = 0, peak_result_rows = 0;  // those of queries of other ranks, and of partial results

  int64_t messages() const { return kv_messages + grad_messages + query_messages + result_messages; }
  // Returns the bytes sent, with elements of `bytes` bytes in the inputs' dtype and of `wide` bytes in the
  // accumulator's, which is that of gradients and results.
  int64_t bytes(int64_t head_dim, int64_t bytes, int64_t wide) const {
    return head_dim * (kv_rows * bytes + grad_rows * wide) +
           query_rows * row_content(BufferKind::kQueries, backward).bytes(head_dim, bytes, wide) +
           result_rows * row_content(BufferKind::kResults, backward).bytes(head_dim, bytes, wide);
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
  kOtherQueries,  // queries of other ranks, and copies of own ones
  kPartialResults,
  kStoragePools,
};

// Returns the storage that `steps` need: in rows of K and of V (or dK and dV), counted separately, and in rows of
// queries and results. The program's buffers have their own numbers; the caller's queries and results need none. They
// are followed, in the order of the sends, by the packed copies of rows that are not contiguous in their buffer; each
// copy lives only in its step.
Storage storage_of(const Program& program, const std::vector<Step>& steps);

// Returns the bytes of a unit of each pool's storage. What is given counts nothing.
std::array<int64_t, kStoragePools> pool_bytes(bool backward, int64_t head_dim, int64_t bytes, int64_t wide);

}  // namespace annulus
