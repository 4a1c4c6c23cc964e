// Makes dropout's draws on a GPU, the same for each pair as those of dropout.cc. Called by dropout_cuda.cc. It has
// never run.
#include "attention/dropout/dropout_cuda.h"
#include "attention/dropout/philox.h"

namespace annulus {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) draw(DropoutArguments a) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pair >= a.rows * a.queries * a.keys) return;
  const int64_t j = pair % a.keys, i = pair / a.keys % a.queries, row = pair / a.keys / a.queries;
  const int64_t key = a.first_key + j * a.key_stride;
  uint32_t words[4];
  philox(static_cast<uint64_t>(a.philox_keys[row]), static_cast<uint64_t>(a.first_query + i * a.query_stride),
         static_cast<uint64_t>(key / 4), words);
  const int64_t w = key % 4;  // chosen by comparisons, because an array that is indexed at run time is in memory
  const uint32_t word = w == 0 ? words[0] : w == 1 ? words[1] : w == 2 ? words[2] : words[3];
  a.kept[pair] = word < a.threshold ? 0 : 1;
}

}  // namespace

cudaError_t launch_dropout(const DropoutArguments& a, cudaStream_t stream) {
  const int64_t blocks = (a.rows * a.queries * a.keys + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  draw<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace annulus
