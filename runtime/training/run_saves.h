// RunSaves: when a run's checkpoints are written behind training, and what becomes of their failures. trainer.cc uses
// it; every rank has one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_save.h"

namespace annulus {

// A checkpoint that is on the disk.
struct SavedCheckpoint {
  int64_t step = 0;
  std::string folder;
  double stopped = 0;  // seconds that training stood still for it
  double seconds = 0;  // from the beginning of its save until it was known to be on the disk
};

// Not thread safe. All functions are collective. At most one save is under way, and the next waits for it.
class RunSaves {
 public:
  struct Settings {
    bool behind = true;    // whether training goes on while checkpoints are written
    bool goes_on = false;  // whether it goes on after a save that failed for a resource, such as a full disk
    // Called on rank 0 as soon as the checkpoint of this step is in `folder` on the disk, on the thread that writes.
    std::function<void(int64_t step, const std::string& folder)> on_disk;
    std::function<void(const SavedCheckpoint&)> saved;     // called on every rank once a checkpoint is on the disk
    std::function<void(const std::string& message)> warn;  // says what all ranks know alike
  };
  // The communicator and the store must outlive this object.
  RunSaves(Communicator& world, CheckpointStore& store, Settings settings);

  // Saves; behind training unless Settings::behind is false. Waits for the save under way first. Raises what either
  // raises, unless the run goes on after it.
  void save(const TrainingState& state, const std::vector<TensorSlice>& slices);
  // Saves the last checkpoint of a run, and returns when it is on the disk. Always raises if it fails. A failure of an
  // earlier save is only said, because this checkpoint takes its place.
  void save_last(const TrainingState& state, const std::vector<TensorSlice>& slices);
  // Called after each step: takes the save under way further, and does not wait for it. Raises as save() does.
  void advance();
  // Waits for the save under way. Raises as save() does.
  void finish();
  bool under_way() const { return save_ != nullptr; }

 private:
  void begin(const TrainingState& state, const std::vector<TensorSlice>& slices, CheckpointSave::Writes writes,
             bool goes_on, double begun);
  void go_on(bool waits, bool goes_on);
  void guarded(int64_t step, bool goes_on, const std::function<void()>& action);

  Communicator& world_;
  CheckpointStore& store_;
  const Settings settings_;
  std::unique_ptr<CheckpointSave> save_;                          // null if none is under way
  CheckpointSave::Writes writes_ = CheckpointSave::Writes::kNow;  // of the save under way
  bool said_ = false;                                             // that it is on the disk
  double begun_ = 0, stopped_ = 0;                                // seconds; of the save under way
};

}  // namespace annulus
