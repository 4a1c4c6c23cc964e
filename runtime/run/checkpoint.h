// CheckpointStore: the checkpoints of one run. A checkpoint is a folder, RUN/checkpoints/step-00000200/, created
// atomically (docs/reference/formats.md). Each rank writes the tensor slices that it holds and reads those that it
// needs, so a checkpoint can be read with any number of ranks and any sharding. Used by the trainer, inference, export
// to Hugging Face's layout and the subcommand `checkpoint`.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/files.h"
#include "runtime/run/checkpoint_manifest.h"
#include "runtime/run/slice_copies.h"
#include "runtime/run/tensor_slice.h"

namespace annulus {

// The training state except tensors.
struct TrainingState {
  int64_t step = 0;                               // the number of completed steps
  std::map<std::string, std::string> extra = {};  // other data for resumption: counters, fingerprints
  std::map<std::string, std::string> model = {};  // the model's configuration keys, informational; may be empty
  std::string folder = {};                        // of the opened checkpoint
};

// Not thread safe. Only one job may save into a run (run_folder.h holds the lock). Every rank of the communicator calls
// collective functions in the same order, with stores of the same folder; if one rank fails, all raise an error that
// names it.
class CheckpointStore {
 public:
  // Changes nothing on the disk before the first save. `keep` >= 1 is the number of checkpoints to retain.
  // `block_bytes`, a multiple of 8, is the size of the blocks of a slice, the unit of checksums and reads.
  CheckpointStore(std::string run_folder, int64_t keep, FileSystem& files = FileSystem::real(),
                  int64_t block_bytes = kBlockBytes);

  // Raises Error(kResource) if the folder of checkpoints exists and cannot be written. Call it before the first step.
  void require_writable() const;

  // Collective. Each rank passes the slices that it writes, possibly none. Together they must contain every element of
  // every tensor exactly once; otherwise Error(kInternal) names the tensor and range. Slices on a GPU are copied to the
  // host block by block. The ranks write and sync their files in a temporary folder, which rank 0 then renames;
  // afterwards checkpoints beyond the newest `keep` valid ones are removed. If a rank fails or a process dies at any
  // time, earlier checkpoints remain. Raises Error(kResource) for I/O errors. Returns the folder. checkpoint_save.h
  // saves while training goes on.
  std::string save(Communicator& comm, const TrainingState& state, const std::vector<TensorSlice>& slices);

  // Collective. Returns the newest valid checkpoint, or nullopt if there is none. All sizes and checksums are verified;
  // the ranks share the work. Adds a line with file and reason to `skipped`, the same on all ranks, for each damaged
  // checkpoint. Raises Error(kResource) if checkpoints, or their folder, exist and cannot be read.
  std::optional<TrainingState> open_newest_valid(Communicator& comm, std::vector<std::string>* skipped,
                                                 CheckpointPart part = CheckpointPart::kAll);

  // Returns the checkpoint of this step, which this rank verifies alone. Raises Error(kInput) if it does not exist (the
  // message lists the steps) or is damaged; Error(kResource) as above.
  TrainingState open(int64_t step, CheckpointPart part = CheckpointPart::kAll);

  // Fills the elements of the slices from the opened checkpoint. Reads only the necessary blocks, one at a time, and
  // verifies their checksums. A floating-point tensor may be read into another floating-point dtype: fp32 to fp64 is
  // exact, and the reverse rounds to nearest. Raises Error(kInput), before it changes anything, if a tensor is missing
  // or has another shape or kind of dtype, or if the manifest is damaged; Error(kInput), which names file, tensor and
  // range, if a block is damaged; Error(kResource) as above.
  void read(const TrainingState& state, const std::vector<TensorSlice>& into);

  const std::string& folder() const { return folder_; }
  // The memory that this rank holds for the copies of saves behind training, in bytes.
  int64_t copy_bytes() const { return copies_[0].bytes() + copies_[1].bytes(); }

  struct Entry {
    std::string path;
    int64_t step = 0;
    int64_t revision = 1;      // how often this step was saved
    bool known_valid = false;  // written or fully verified by these ranks
  };
  // Returns all folders with the name of a checkpoint, valid or not. Raises Error(kResource) if the folder of
  // checkpoints exists and cannot be read.
  std::vector<Entry> newest_first() const;
  // Returns those of one step, or of all steps for nullopt. Raises Error(kInput), which lists the existing steps, if
  // there is none.
  std::vector<Entry> newest_first(std::optional<int64_t> step) const;

 private:
  friend class CheckpointSave;

  std::optional<Entry> entry_of(const std::string& name) const;
  std::vector<Entry> newest_first(Communicator& comm, OpLabel label) const;
  TrainingState opened(const Entry& entry, Manifest manifest);

  std::string folder_;
  int64_t keep_;
  FileSystem& files_;
  int64_t block_bytes_;
  // Checkpoints that these ranks have written or fully verified; rank 0's set is authoritative.
  std::set<std::string> known_valid_;
  // The copies from which saves behind training write: of the model and of the optimizer.
  std::array<SliceCopies, 2> copies_;
  // Of the checkpoint opened last: its folder and manifest.
  std::string opened_;
  std::shared_ptr<const Manifest> manifest_;
};

}  // namespace annulus
