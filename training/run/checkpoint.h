// CheckpointStore: the checkpoints of one run. A checkpoint is a folder that is whole or does not exist
// (docs/formats.md): RUN/checkpoints/step-00000200/. Each rank writes the slices of the tensors that it has, and reads
// those that it needs: how many ranks wrote a checkpoint, and how they cut the tensors, does not matter to readers.
// Used by the trainer, the sampler and the verb `checkpoint`.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/files.h"
#include "training/run/checkpoint_manifest.h"
#include "training/run/tensor_slice.h"

namespace annulus {

// All of a training state but its tensors.
struct TrainingState {
  int64_t step = 0;                               // steps done
  std::map<std::string, std::string> extra = {};  // whatever else a resumed run needs: counters, fingerprints
  std::map<std::string, std::string> model = {};  // what the model is, for people and other programs; may be empty
  std::string folder = {};                        // of an opened one: where it lies
};

// Not thread-safe. Only one job may save into a run (run_folder.h holds the lock). Collective functions are called by
// every rank of the communicator in the same order, with stores of the same folder; where one rank fails, all raise an
// error that names it.
class CheckpointStore {
 public:
  // Touches nothing before the first save. `keep`: at least 1. `block_bytes`: of a slice, that have a checksum of their
  // own and are read at once; a multiple of 8.
  CheckpointStore(std::string run_folder, int64_t keep, FileSystem& files = FileSystem::real(),
                  int64_t block_bytes = kBlockBytes);

  // Raises Error(kResource) where checkpoints of this run are there and no more can be written: better before the steps
  // than after them.
  void require_writable() const;

  // Collective. Each rank gives the slices that it writes, possibly none; together they are every element of every
  // tensor exactly once, or Error(kInternal) names tensor and range. Slices on a GPU are brought to the host block by
  // block. Written beside, every file and the folder synced by their ranks, renamed once by rank 0; only then are
  // checkpoints beyond the newest `keep` valid ones removed. Whenever it fails on a rank or a process dies, what was
  // there before is still there. Raises Error(kResource). Returns the folder.
  std::string save(Communicator& comm, const TrainingState& state, const std::vector<TensorSlice>& slices);

  // Collective. The newest checkpoint that is whole: every size, every checksum, of which the ranks look at a part
  // each. Those passed over are described in `skipped`, one line each: file and reason, alike on all ranks. Empty when
  // there is none. Raises Error(kResource) where checkpoints, or the folder of them, are there and may not or cannot be
  // read.
  std::optional<TrainingState> open_newest_valid(Communicator& comm, std::vector<std::string>* skipped,
                                                 CheckpointPart part = CheckpointPart::kAll);

  // The checkpoint of this step, all of it looked at by this rank alone. Raises Error(kInput) that names the steps
  // there are where it is not one of them, or says what is damaged; Error(kResource) as above.
  TrainingState open(int64_t step, CheckpointPart part = CheckpointPart::kAll);

  // Copies into the slices' `values` what the opened checkpoint has for them. Reads the blocks that hold it, no others,
  // one at a time, and compares their checksums. Raises Error(kInput), with everything untouched, where a tensor is not
  // there or of another shape or dtype, or where the manifest is damaged; Error(kInput) that names file, tensor and
  // range where a block is; Error(kResource) as above.
  void read(const TrainingState& state, const std::vector<TensorSlice>& into);

  const std::string& folder() const { return folder_; }

  struct Entry {
    std::string path;
    int64_t step = 0;
    int64_t revision = 1;      // of several writings of a step
    bool known_valid = false;  // to these ranks
  };
  // What looks like a checkpoint, whole or not. Raises Error(kResource) where the folder is there and cannot be read.
  std::vector<Entry> newest_first() const;
  // The same of one step, or of all without one. Raises Error(kInput), naming the steps there are, where there is none.
  std::vector<Entry> newest_first(std::optional<int64_t> step) const;

 private:
  std::optional<Entry> entry_of(const std::string& name) const;
  std::vector<Entry> newest_first(Communicator& comm, OpLabel label) const;
  std::string begin_save(int64_t step);
  bool valid(Communicator& comm, OpLabel label, const Entry& entry);
  void remove_old(Communicator& comm, OpLabel label);
  void remove_doomed(const std::vector<Entry>& doomed);
  TrainingState opened(const Entry& entry, Manifest manifest);

  std::string folder_;
  int64_t keep_;
  FileSystem& files_;
  int64_t block_bytes_;
  // Written or checked in full by these ranks; that of rank 0 counts.
  std::set<std::string> known_valid_;
  // Of the checkpoint opened last.
  std::string opened_;
  std::shared_ptr<const Manifest> manifest_;
};

}  // namespace annulus
