// Helpers of checkpoint_worlds_test and checkpoint_faults_test: checkpoints whose tensors are cut at random places and
// dealt to ranks, saved and read back by any number of ranks.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include <cstdio>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "runtime/run/checkpoint_save.h"
#include "tests/runtime/run/checkpoints.h"

namespace annulus {

constexpr int64_t kBlock = 64;

// Tensors of several dtypes with few or many blocks, with one element and with none.
inline std::vector<NamedTensor> tensors_of(int64_t step) {
  const auto numbers = [&](std::vector<int64_t> shape, at::ScalarType dtype, int64_t of) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return at::arange(of + step, of + step + 7 * count, 7, at::kLong).remainder(251).to(dtype).view(shape);
  };
  return {{"model.a", numbers({7, 19}, at::kFloat, 1)},     {"model.b", numbers({5}, at::kBFloat16, 2)},
          {"model.none", numbers({0, 3}, at::kFloat, 3)},   {"model.scalar", numbers({}, at::kDouble, 4)},
          {"optimizer.a", numbers({7, 19}, at::kFloat, 5)}, {"optimizer.b", numbers({31}, at::kDouble, 6)},
          {"optimizer.count", numbers({1}, at::kLong, 7)},  {"optimizer.mask", numbers({130}, at::kByte, 8)}};
}

// The slices of each rank: the tensors are cut at random places and dealt at random. In one of three draws the last of
// several ranks gets none.
inline std::vector<std::vector<TensorSlice>> cut(const std::vector<NamedTensor>& tensors, int ranks, unsigned seed) {
  std::mt19937 draw(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); };
  const int64_t writers = ranks > 1 && below(3) == 0 ? ranks - 1 : ranks;
  std::vector<std::vector<TensorSlice>> slices(static_cast<size_t>(ranks));
  for (const TensorSlice& whole : whole_slices(tensors)) {
    const int64_t count = whole.values.numel();
    const int64_t pieces = below(4) == 0 ? 1 : 1 + below(5);
    std::vector<int64_t> at = {0, count};
    for (int64_t i = 1; i < pieces; ++i) at.push_back(below(count + 1));  // two equal places make an empty slice
    std::sort(at.begin(), at.end());
    for (size_t i = 0; i + 1 < at.size(); ++i) {
      slices[static_cast<size_t>(below(writers))].push_back(
          {whole.name, whole.shape, at[i], whole.values.narrow(0, at[i], at[i + 1] - at[i])});
    }
  }
  return slices;
}

inline void save(Communicator& world, CheckpointStore& store, int64_t step, unsigned seed) {
  store.save(world, state_of(step).state, cut(tensors_of(step), world.size(), seed)[static_cast<size_t>(world.rank())]);
}

// Saves behind training, which meanwhile changes what is saved and communicates. `each_time` is called before that and
// may throw.
inline void save_behind(Communicator& world, CheckpointStore& store, int64_t step, unsigned seed,
                        const std::function<void()>& each_time = nullptr) {
  std::vector<NamedTensor> tensors = tensors_of(step);
  CheckpointSave save(store, world, state_of(step).state,
                      cut(tensors, world.size(), seed)[static_cast<size_t>(world.rank())],
                      CheckpointSave::Writes::kBehind);
  while (!save.done()) {
    if (each_time) each_time();
    for (NamedTensor& t : tensors) t.tensor.add_(1);
    at::Tensor sum = at::ones({1});
    world.all_reduce(sum, ReduceOp::kSum, {"training"});
    save.advance();
    std::this_thread::yield();
  }
}

// Saves in one of the two ways.
inline void save_by(bool behind, Communicator& world, CheckpointStore& store, int64_t step, unsigned seed,
                    const std::function<void()>& each_time = nullptr) {
  behind ? save_behind(world, store, step, seed, each_time) : save(world, store, step, seed);
}

// Saves the step on `ranks` ranks and returns the checkpoint's folder.
inline std::string saved(const std::string& run, int64_t step, int ranks, unsigned seed = 1, int64_t keep = 9,
                         FileSystem& files = FileSystem::real()) {
  run_ranks(ranks, [&](Communicator& world) {
    CheckpointStore store(run, keep, files, kBlock);
    save(world, store, step, seed);
  });
  char name[32];
  std::snprintf(name, sizeof name, "/checkpoints/step-%08d", static_cast<int>(step));
  return run + name;
}

// Reads the newest valid checkpoint on `ranks` ranks, each in its own ranges, checks it and returns its step, or -1 if
// there is none. `skipped` receives the reports of skipped checkpoints, which must be the same on all ranks.
inline int64_t read_back(const std::string& run, int ranks, unsigned seed = 2,
                         std::vector<std::string>* skipped = nullptr) {
  std::mutex mutex;
  int64_t step = -2;
  std::vector<std::string> told;
  run_ranks(ranks, [&](Communicator& world) {
    CheckpointStore store(run, 9);
    std::vector<std::string> lines;
    const auto state = store.open_newest_valid(world, &lines);
    if (state) {
      const std::vector<NamedTensor> expected = tensors_of(state->step);
      EXPECT_TRUE(same(*state, state_of(state->step).state));
      const auto wanted = cut(expected, ranks, seed)[static_cast<size_t>(world.rank())];
      std::vector<TensorSlice> into = wanted;
      for (TensorSlice& slice : into) slice.values = at::zeros_like(slice.values);
      store.read(*state, into);
      for (size_t i = 0; i < into.size(); ++i) {
        EXPECT_TRUE(at::equal(into[i].values, wanted[i].values)) << into[i].name << " from " << into[i].begin;
      }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const int64_t mine = state ? state->step : -1;
    EXPECT_TRUE(step == -2 || (step == mine && told == lines)) << "ranks differ";
    step = mine;
    told = lines;
  });
  if (skipped) *skipped = told;
  return step;
}

}  // namespace annulus
