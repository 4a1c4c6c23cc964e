// See link_probe.h.
#include "comm/link_probe.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace annulus {
namespace {

constexpr int64_t kElements = 64 << 10;  // of fp32
constexpr int kTurns = 5;

}  // namespace

std::vector<double> probe_links(Communicator& communicator) {
  Communicator& comm = communicator.host();
  const int ranks = comm.size(), self = comm.rank();
  at::Tensor block = at::zeros({kElements}, at::kFloat), answer = at::zeros({1}, at::kFloat);
  double least = std::numeric_limits<double>::infinity();
  for (int from = 0; from < ranks && ranks > 1; ++from) {
    const int to = (from + 1) % ranks;
    const OpLabel label{"measuring the links between ranks", from + 1, "link"};
    comm.barrier(label);
    for (int turn = 0; turn < kTurns; ++turn) {
      const auto begin = std::chrono::steady_clock::now();
      if (self == from) {
        comm.exchange({{block, to}}, {}, label)->wait();
        comm.exchange({}, {{answer, to}}, label)->wait();
        least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      } else if (self == to) {
        comm.exchange({}, {{block, from}}, label)->wait();
        comm.exchange({{answer, from}}, {}, label)->wait();
      }
    }
  }
  at::Tensor all = at::zeros({ranks}, at::kDouble);
  if (ranks > 1) comm.all_gather(all, at::full({}, least, at::kDouble), {"measuring the links between ranks"});
  const double* seconds = all.const_data_ptr<double>();
  return {seconds, seconds + ranks};
}

}  // namespace annulus
