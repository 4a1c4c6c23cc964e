// Helpers of the checkpoint tests: states to save, a store that saves and loads whole tensors on one rank, and ways to
// damage files.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/run/checkpoint.h"
#include "runtime/tensor_files/named_tensor.h"

namespace annulus {

inline std::string fresh_run(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

// A training state together with its whole tensors.
struct WholeState {
  TrainingState state;
  std::vector<NamedTensor> tensors;
};

// A state that depends on the step alone and differs between steps.
inline WholeState state_of(int64_t step) {
  const auto x = static_cast<double>(step);
  return {{.step = step,
           .extra = {{"text", "fingerprint"}, {"seed", std::to_string(step)}},
           .model = {{"dim", "4"}, {"layers", std::to_string(step)}}},
          {{"model.a", at::full({3, 4}, x, at::kFloat)},
           {"model.b", at::full({5}, x, at::kBFloat16)},
           {"optimizer.m.a", at::full({3, 4}, x / 3, at::kDouble)},
           {"optimizer.count", at::full({}, step, at::kLong)}}};
}

inline bool same(const TrainingState& got, const TrainingState& expected) {
  return got.step == expected.step && got.extra == expected.extra && got.model == expected.model;
}

inline bool same(const WholeState& got, const WholeState& expected) {
  if (!same(got.state, expected.state) || got.tensors.size() != expected.tensors.size()) return false;
  return std::all_of(expected.tensors.begin(), expected.tensors.end(), [&](const NamedTensor& e) {
    return std::any_of(got.tensors.begin(), got.tensors.end(), [&](const NamedTensor& g) {
      return g.name == e.name && g.tensor.scalar_type() == e.tensor.scalar_type() && at::equal(g.tensor, e.tensor);
    });
  });
}

// A checkpoint store of a single rank that saves and loads states as a whole.
class WholeStore {
 public:
  WholeStore(const std::string& run, int64_t keep, FileSystem& files = FileSystem::real()) : store_(run, keep, files) {}

  std::string save(const WholeState& whole) { return store_.save(*self_, whole.state, whole_slices(whole.tensors)); }
  std::optional<WholeState> load_newest_valid(std::vector<std::string>* skipped,
                                              CheckpointPart part = CheckpointPart::kAll) {
    for (;;) {
      const auto state = store_.open_newest_valid(*self_, skipped, part);
      if (!state) return std::nullopt;
      try {
        return read(*state, part);
      } catch (const Error&) {
        // A live run may have removed the checkpoint since it was found.
        if (std::filesystem::exists(state->folder)) throw;
      }
    }
  }
  WholeState load(int64_t step, CheckpointPart part = CheckpointPart::kAll) {
    return read(store_.open(step, part), part);
  }
  CheckpointStore& store() { return store_; }

 private:
  WholeState read(const TrainingState& state, CheckpointPart part) {
    WholeState whole{state, {}};
    for (const ManifestTensor& t : read_manifest(state.folder).tensors) {
      if (part == CheckpointPart::kModel && is_optimizer(t.name)) continue;
      whole.tensors.push_back({t.name, at::empty(t.shape, at::TensorOptions(t.dtype))});
    }
    store_.read(state, whole_slices(whole.tensors));
    return whole;
  }

  std::shared_ptr<Communicator> self_ = make_self_communicator();
  CheckpointStore store_;
};

inline std::vector<std::string> names(const std::string& run) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(run + "/checkpoints")) {
    out.push_back(entry.path().filename());
  }
  std::sort(out.begin(), out.end());
  return out;
}

inline std::string content(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

inline void put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

inline void flip(const std::string& path, size_t at, int bit = 0) {
  std::string bytes = content(path);
  bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
  put(path, bytes);
}

// Expects that each folder named like a checkpoint can be loaded.
inline void expect_whole(const std::string& run) {
  std::vector<std::string> skipped;
  for (const std::string& name : names(run)) {
    if (!name.starts_with("step-")) continue;
    const std::string alone = fresh_run("alone");
    std::filesystem::create_directories(alone + "/checkpoints");
    std::filesystem::copy(run + "/checkpoints/" + name, alone + "/checkpoints/" + name,
                          std::filesystem::copy_options::recursive);
    EXPECT_TRUE(WholeStore(alone, 1).load_newest_valid(&skipped)) << name << ": " << skipped.back();
  }
}

}  // namespace annulus
