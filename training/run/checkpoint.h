// CheckpointStore: the checkpoints of one run. A checkpoint is a folder that is whole or does not exist
// (docs/formats.md): RUN/checkpoints/step-00000200/{model.safetensors, optimizer.safetensors, manifest.json}. Used by
// the trainer (one rank writes, every rank reads) and the sampler.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/files.h"
#include "tensor_files/named_tensor.h"

namespace annulus {

// Tensors whose names begin with "optimizer." go to a file of their own, so that model.safetensors can be handed on.
struct TrainingState {
  int64_t step = 0;                          // steps done
  std::vector<NamedTensor> tensors;          // loaded ones: CPU, contiguous, dtype as saved
  std::map<std::string, std::string> extra;  // whatever else a resumed run needs: counters, fingerprints
  std::string folder = {};                   // of a loaded one: where it lies
};

enum class CheckpointPart { kAll, kModel };

// Not thread-safe. Only one process may save into a run (run_folder.h holds the lock).
class CheckpointStore {
 public:
  // Touches nothing before the first save. `keep`: at least 1.
  CheckpointStore(std::string run_folder, int64_t keep, FileSystem& files = FileSystem::real());

  // Raises Error(kResource) where checkpoints of this run are there and no more can be written: better before the steps
  // than after them.
  void require_writable() const;

  // Written beside, every file and the folder synced, renamed; only then are checkpoints beyond the newest `keep` valid
  // ones removed. Whenever it fails or the process dies, what was there before is still there. Raises Error(kResource).
  // Returns the folder.
  std::string save(const TrainingState& state);

  // The newest checkpoint that is whole: every size, every checksum. Those passed over are described in `skipped`, one
  // line each: path and reason. Empty when there is none. Raises Error(kResource) where checkpoints, or the folder of
  // them, are there and may not or cannot be read.
  std::optional<TrainingState> load_newest_valid(std::vector<std::string>* skipped,
                                                 CheckpointPart part = CheckpointPart::kAll);

  // The checkpoint of this step. Raises Error(kInput) that names the steps there are where it is not one of them, or
  // says what is damaged; Error(kResource) as above.
  TrainingState load(int64_t step, CheckpointPart part = CheckpointPart::kAll);

  const std::string& folder() const { return folder_; }

 private:
  struct Entry {
    std::string path;
    int64_t step;
    int64_t revision;
  };
  std::vector<Entry> newest_first() const;
  TrainingState read_all(const Entry& entry, CheckpointPart part);
  bool valid(const Entry& entry);
  void remove_old();

  std::string folder_;
  int64_t keep_;
  FileSystem& files_;
  std::set<std::string> known_valid_;  // written or read in full by this process
};

}  // namespace annulus
