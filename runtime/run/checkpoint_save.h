// CheckpointSave: one save of a checkpoint (checkpoint.h), behind which training may go on. Used by CheckpointStore and
// by the trainer (runtime/training/run_saves.h).
//
// A save is a sequence of actions on files: the ranks write their slices and sync them; rank 0 writes the manifest and
// publishes the checkpoint under its name; the ranks verify what is not known to be valid of the older checkpoints that
// are to be kept; rank 0 removes the others. Each action runs by itself, behind training on a thread, and communicates
// nothing. Between two actions the threads that train agree that all ranks have ended the one before: a checkpoint is
// published only once the slices of every rank are on the disk.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_files.h"

namespace annulus {

// Not thread safe. Every rank of the communicator calls the same functions in the same order; if one rank fails, all
// raise an error that names it, after which the save has ended. Until a save has ended, nothing else uses its store.
class CheckpointSave {
 public:
  enum class Writes {
    kNow,     // in the functions of this class, while they are called; the slices must stay as they are until finish()
    kBehind,  // on a thread; the slices may change as soon as the constructor has returned
  };

  // Collective, as CheckpointStore::save. With kBehind the slices are copied (slice_copies.h), but those that lie in a
  // file are written to the checkpoint's file at once, block by block, and only synced and published behind. Calls
  // `on_disk` on rank 0 as soon as the checkpoint is on the disk, with kBehind on the thread.
  CheckpointSave(CheckpointStore& store, Communicator& comm, const TrainingState& state,
                 const std::vector<TensorSlice>& slices, Writes writes,
                 std::function<void(const std::string& folder)> on_disk = nullptr);
  // Of a save that has not ended, the writing is given up. What it has left in its temporary folder the next removes.
  ~CheckpointSave();
  CheckpointSave(const CheckpointSave&) = delete;
  CheckpointSave& operator=(const CheckpointSave&) = delete;

  // Collective, only with kBehind: begins the next action if all ranks have ended theirs, and does not wait for it.
  void advance();
  // Collective: waits for the action under way on all ranks, and begins the next.
  void advance_waiting() { next(); }
  // Collective: waits until everything is done.
  void finish() {
    while (!done()) advance_waiting();
  }

  int64_t step() const { return state_.step; }
  const std::string& folder() const { return path_; }
  // Whether all ranks know that it is published: on the disk, where it survives a power failure.
  bool published() const { return doing_ > Doing::kPublish; }
  bool done() const { return doing_ == Doing::kNothing; }  // older checkpoints have been removed as well

 private:
  enum class Doing { kWrite, kPublish, kVerify, kRemove, kNothing };
  // The files of the model and of the optimizer; without slices this rank writes no such file.
  struct Part {
    std::string file;
    std::vector<TensorSlice> slices;
    std::optional<SlicesFile> early;  // written while training stands still
  };

  std::string make_folder();
  void begin(Doing doing, std::function<void()> action);
  void end_action();
  SlicesFile slices_file(const Part& part);
  void write();
  void publish(const std::vector<std::string>& parts);
  void verify_next();
  void verified();
  bool is_valid(const CheckpointStore::Entry& entry, const std::exception_ptr& damage);
  void remove();
  bool all_have_ended();
  void next();

  CheckpointStore& store_;
  Communicator& comm_;
  const OpLabel label_;
  const TrainingState state_;
  const bool behind_;
  const std::function<void(const std::string& folder)> on_disk_;
  std::array<Part, 2> parts_;
  std::string path_, beside_;  // the checkpoint's folder and its temporary one

  // Set by the action and read once it has ended.
  std::string written_;                      // what this rank has written, for the manifest
  std::vector<std::exception_ptr> damages_;  // of verified_

  std::vector<CheckpointStore::Entry> entries_;  // all checkpoints, the newest first
  size_t looked_at_ = 0;                         // the number of entries_ that have been dealt with
  int64_t kept_ = 0, last_step_ = -1;            // of these
  std::vector<size_t> verified_;                 // the entries that the action verifies
  std::vector<CheckpointStore::Entry> doomed_;

  Doing doing_ = Doing::kWrite;
  std::atomic<bool> failed_ = false;    // the action on this rank
  std::atomic<bool> given_up_ = false;  // set for the action, which then ends early
  std::future<void> action_;            // ends before what it uses
};

}  // namespace annulus
