// See run_saves.h.
#include "runtime/training/run_saves.h"

#include <utility>

#include "common/clock.h"
#include "common/text.h"

namespace annulus {

RunSaves::RunSaves(Communicator& world, CheckpointStore& store, Settings settings)
    : world_(world), store_(store), settings_(std::move(settings)) {}

// Runs an action of a save. A failure ends the save, and the run as well unless it goes on.
void RunSaves::guarded(int64_t step, bool goes_on, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    const bool on_disk = save_ && save_->published();
    save_.reset();
    // Only what the disk or the memory refuses may pass. After a failure of another kind, such as that of a rank, the
    // ranks cannot go on together.
    if (!goes_on || error.kind() != ErrorKind::kResource) throw;
    settings_.warn((on_disk ? "older checkpoints than that of step " : "no checkpoint of step ") + with_commas(step) +
                   (on_disk ? " could not be removed: " : " could be written: ") + std::string(error.message()) +
                   "; the run goes on");
  }
}

// Begins a save for which training has stood still since `begun`.
void RunSaves::begin(const TrainingState& state, const std::vector<TensorSlice>& slices, CheckpointSave::Writes writes,
                     bool goes_on, double begun) {
  writes_ = writes;
  begun_ = begun;
  said_ = false;
  const auto on_disk = [tell = settings_.on_disk, step = state.step](const std::string& folder) {
    if (tell) tell(step, folder);
  };
  guarded(state.step, goes_on,
          [&] { save_ = std::make_unique<CheckpointSave>(store_, world_, state, slices, writes, on_disk); });
  stopped_ = steady_seconds() - begun;
}

// Takes the save under way further. If `waits`, to its end.
void RunSaves::go_on(bool waits, bool goes_on) {
  while (save_) {
    const double from = steady_seconds();
    SavedCheckpoint saved{.step = save_->step(), .folder = save_->folder()};
    bool on_disk = false;
    guarded(saved.step, goes_on, [&] {
      try {
        waits ? save_->advance_waiting() : save_->advance();
      } catch (...) {
        on_disk = save_->published();
        throw;
      }
      on_disk = save_->published();
    });
    const double now = steady_seconds();
    if (!waits) stopped_ += now - from;
    if (on_disk && !said_) {
      said_ = true;
      saved.seconds = now - begun_;
      // What waits for a save behind training, such as the next save, has stood still for itself.
      saved.stopped = writes_ == CheckpointSave::Writes::kNow ? saved.seconds : stopped_;
      settings_.saved(saved);
    }
    if (save_ && save_->done()) save_.reset();
    if (!waits) return;
  }
}

void RunSaves::save(const TrainingState& state, const std::vector<TensorSlice>& slices) {
  const double begun = steady_seconds();
  finish();
  if (settings_.behind) return begin(state, slices, CheckpointSave::Writes::kBehind, settings_.goes_on, begun);
  begin(state, slices, CheckpointSave::Writes::kNow, settings_.goes_on, begun);
  finish();
}

void RunSaves::save_last(const TrainingState& state, const std::vector<TensorSlice>& slices) {
  const double begun = steady_seconds();
  go_on(/*waits=*/true, /*goes_on=*/true);
  begin(state, slices, CheckpointSave::Writes::kNow, /*goes_on=*/false, begun);
  go_on(/*waits=*/true, /*goes_on=*/false);
}

void RunSaves::advance() { go_on(/*waits=*/false, settings_.goes_on); }

void RunSaves::finish() { go_on(/*waits=*/true, settings_.goes_on); }

}  // namespace annulus
