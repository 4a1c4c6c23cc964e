// See ring.h.
#include "ring.h"

#include <ATen/ops/empty.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

bool planted(std::string_view bug) {
  const char* const name = std::getenv("RING_BUG");
  return name != nullptr && bug == name;
}

// One block on its way: its elements, and behind them the rank that it comes from.
at::Tensor message(int64_t n) { return at::empty({n + 1}, at::kDouble); }

}  // namespace

void ring_all_reduce(annulus::Communicator& comm, at::Tensor& x) {
  const int size = comm.size(), rank = comm.rank(), right = (rank + 1) % size, left = (rank + size - 1) % size;
  const int64_t n = x.numel();
  if (planted("patient")) comm.set_timeout(annulus::Seconds(365 * 86400));
  const int to_right = size / 2;
  // With an even number of ranks the block of the opposite rank comes from one side only.
  const int to_left = planted("even") ? size / 2 : (size - 1) / 2;

  std::vector<at::Tensor> blocks(static_cast<size_t>(size));
  const auto block = [&](int r) -> at::Tensor& { return blocks[static_cast<size_t>((r + 2 * size) % size)]; };
  block(rank) = message(n);
  block(rank).narrow(0, 0, n).copy_(x);
  block(rank)[n] = rank;

  at::Tensor sum = x.clone();
  const auto arrived = [&](int from, at::Tensor received) {
    const int expected = (from + 2 * size) % size, got = received[n].item<int>();
    if (got != expected && !planted("trusting")) {
      throw std::runtime_error("ring: expected the block of rank " + std::to_string(expected) + ", got that of rank " +
                               std::to_string(got));
    }
    if (planted("first come") || planted("even")) sum += received.narrow(0, 0, n);
    block(from) = std::move(received);
  };

  for (int step = 1; step <= to_right || step <= to_left; ++step) {
    struct Way {
      int from = 0;
      at::Tensor in;
      std::unique_ptr<annulus::Work> work;
    };
    std::vector<Way> ways;
    const auto start = [&](int to, int from_peer, int sent, int from) {
      Way& way = ways.emplace_back(Way{from, message(n), nullptr});
      const annulus::OpLabel label{to == right ? "ring to the right" : "ring to the left", step, "step"};
      if (planted("sends first")) {
        comm.exchange({{block(sent), to}}, {}, label)->wait();
        way.work = comm.exchange({}, {{way.in, from_peer}}, label);
      } else {
        way.work = comm.exchange({{block(sent), to}}, {{way.in, from_peer}}, label);
      }
    };
    ways.reserve(2);
    if (step <= to_right) start(right, left, rank - step + 1, rank - step);
    if (step <= to_left) start(left, right, rank + step - 1, rank + step);
    while (planted("first come") && ways.size() == 2) {
      for (size_t w = 0; w < ways.size(); ++w) {
        if (!ways[w].work->test()) continue;
        arrived(ways[w].from, ways[w].in);
        ways.erase(ways.begin() + static_cast<std::ptrdiff_t>(w));
        break;
      }
    }
    for (Way& way : ways) {
      way.work->wait();
      arrived(way.from, way.in);
    }
  }
  if (planted("first come") || planted("even")) {
    x.copy_(sum);
    return;
  }
  // In the order of the ranks, so that all of them round in the same way.
  x.copy_(block(0).narrow(0, 0, n));
  for (int r = 1; r < size; ++r) x += block(r).narrow(0, 0, n);
}
