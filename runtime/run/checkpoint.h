// CheckpointStore: the checkpoints of one run. A checkpoint is a folder, RUN/checkpoints/step-00000200/, that is either
// whole or does not exist (docs/formats.md). Each rank writes the slices of tensors that it has and reads those that it
// needs, so a reader need not know how many ranks wrote a checkpoint or how they divided the tensors. The trainer,
// inference, export to Hugging Face's layout and the verb `checkpoint` use it.
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
#include "runtime/run/checkpoint_manifest.h"
#include "runtime/run/tensor_slice.h"

namespace annulus {

// A training state without its tensors.
struct TrainingState {
  int64_t step = 0;                               // the number of steps done
  std::map<std::string, std::string> extra = {};  // what else a resumed run needs: counters, fingerprints
  std::map<std::string, std::string> model = {};  // the model's keys, for people and other programs; may be empty
  std::string folder = {};                        // the folder of a checkpoint that was opened
};

// Not thread-safe. Only one job may save into a run (run_folder.h holds the lock). Every rank of the communicator calls
// collective functions in the same order, with stores of the same folder; if one rank fails, all raise an error that
// names it.
class CheckpointStore {
 public:
  // Changes nothing on the disk before the first save. `keep` is at least 1. `block_bytes` is the size of the parts of
  // a slice that have their own checksum and are read at once, a multiple of 8.
  CheckpointStore(std::string run_folder, int64_t keep, FileSystem& files = FileSystem::real(),
                  int64_t block_bytes = kBlockBytes);

  // Raises Error(kResource) if the folder of checkpoints exists and cannot be written. Call it before the first step.
  void require_writable() const;

  // Collective. Each rank passes the slices that it writes, possibly none. Together they must contain every element of
  // every tensor exactly once; otherwise Error(kInternal) names the tensor and range. Slices on a GPU are copied to the
  // host block by block. The ranks write and sync their files in a temporary folder, which rank 0 then renames; only
  // after that are checkpoints beyond the newest `keep` valid ones removed. If a rank fails or a process dies at any
  // time, earlier checkpoints remain. Raises Error(kResource). Returns the folder.
  std::string save(Communicator& comm, const TrainingState& state, const std::vector<TensorSlice>& slices);

  // Collective. Returns the newest checkpoint that is whole, or nothing if there is none. All sizes and checksums are
  // checked; the ranks share the work. Damaged checkpoints are described in `skipped`, one line each with file and
  // reason, the same on all ranks. Raises Error(kResource) if checkpoints, or the folder of them, exist and cannot be
  // read.
  std::optional<TrainingState> open_newest_valid(Communicator& comm, std::vector<std::string>* skipped,
                                                 CheckpointPart part = CheckpointPart::kAll);

  // Returns the checkpoint of this step, which this rank checks alone. Raises Error(kInput), which names the existing
  // steps if this is not one of them, or says what is damaged; Error(kResource) as above.
  TrainingState open(int64_t step, CheckpointPart part = CheckpointPart::kAll);

  // Copies what the opened checkpoint has for the slices into their `values`. Reads only the blocks that contain it,
  // one at a time, and compares their checksums. A floating-point tensor may be read into another floating-point dtype:
  // fp32 to fp64 is exact, and the other way rounds to nearest. Raises Error(kInput) before it changes anything if a
  // tensor is missing or has another shape, or a dtype of another kind, or if the manifest is damaged; Error(kInput)
  // that names file, tensor and range if a block is damaged; Error(kResource) as above.
  void read(const TrainingState& state, const std::vector<TensorSlice>& into);

  const std::string& folder() const { return folder_; }

  struct Entry {
    std::string path;
    int64_t step = 0;
    int64_t revision = 1;      // counts the times that this step was saved
    bool known_valid = false;  // whether these ranks have written or checked it
  };
  // Returns all folders with the name of a checkpoint, whole or not. Raises Error(kResource) if the folder of
  // checkpoints exists and cannot be read.
  std::vector<Entry> newest_first() const;
  // The same for one step, or for all steps. Raises Error(kInput), which names the existing steps, if there is none.
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
  // The checkpoints that these ranks have written or checked in full; rank 0's set is decisive.
  std::set<std::string> known_valid_;
  // The folder and manifest of the checkpoint that was opened last.
  std::string opened_;
  std::shared_ptr<const Manifest> manifest_;
};

}  // namespace annulus
