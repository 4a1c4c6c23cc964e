// Divides the tiles of a step into work items for the threads of the cpu kernel. Used by cpu_kernel.cc.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "attention/kernels/cpu/tile_sets.h"
#include "attention/tiles/kernel.h"
#include "attention/tiles/tile_views.h"
#include "common/trace/beat.h"

namespace annulus {

// Query rows of query heads with the same kv head: a block of rows of a set's single run, or all rows of its runs.
struct Item {
  const TileSet* set;
  int64_t batch;
  Span heads;
  std::vector<Span> rows;  // of each run of the set, indices into its query rows

  Span rows_of(size_t run) const { return members(set->queries[run].rows, rows[run]); }
  Span positions_of(size_t run) const { return members(set->queries[run].positions, rows[run]); }
  int64_t count() const;  // of rows per head
  int64_t pairs() const;  // an upper bound: includes a few masked pairs
};

// Returns the items of a set; `group` is the number of query heads per kv head. Normally the blocks of one head are
// adjacent, so that its keys stay in the cache; with `heads_apart` the heads alternate.
//
// Large blocks pack their keys less often, but threads need several blocks to share. The division depends only on
// whether there is more than one thread, so the number of threads changes no bit of a forward, nor of dk and dv. It may
// change dq if there are fewer kv heads than threads: then several threads share a head, and each but the first
// accumulates its own partial dq (CpuKernel::run_backward).
std::vector<Item> items_of(const TileSet& set, int64_t group, bool heads_apart);

// Returns the limits for queries with `rows` rows in all batch rows and heads together.
SetLimits set_limits(int64_t rows, int64_t group);

// Returns the number of threads that pays off for this work: starting and joining a thread costs some ten microseconds,
// and much more if other processes compete for the cores.
int64_t threads_for(double flops);

// Runs work(i, thread) for i = 0, ..., n - 1 on up to `threads` threads, numbered from 0, with dynamic scheduling. When
// the calling thread runs out of work, it polls until the others are done. Each item is a beat (common/trace/beat.h).
template <typename Work>
void for_each_in_parallel(int64_t n, int64_t threads, const Kernel::Poll& poll, Work work) {
  threads = std::min(n, threads);
  if (threads == 1) {
    for (int64_t i = 0; i < n; ++i) {
      work(static_cast<size_t>(i), size_t{0});
      beat();
    }
    return;
  }
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int64_t> next = 0, working = 0;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      ++working;
      try {
        for (int64_t i = next++; i < n; i = next++) {
          work(static_cast<size_t>(i), static_cast<size_t>(begin));
          beat();
        }
      } catch (...) {
        next = n;  // the others start nothing more
        --working;
        throw;
      }
      --working;
      if (!poll || std::this_thread::get_id() != caller) continue;
      for (; working > 0; std::this_thread::yield()) poll();
    }
  });
}

}  // namespace annulus
