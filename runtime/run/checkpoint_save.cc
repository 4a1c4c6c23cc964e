// See checkpoint_save.h.
#include "runtime/run/checkpoint_save.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "comm/agreement.h"
#include "common/error.h"
#include "common/trace/recorder.h"
#include "runtime/run/checkpoint_stages.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Entry = CheckpointStore::Entry;

constexpr std::string_view kTemporary = ".tmp-";
constexpr TraceName kWriterThread = "checkpoint writer";

struct GivenUp {};  // ends an action; another rank has failed, or this object is being destroyed

// Returns the slices of the model (part 0) or of the optimizer (part 1). Empty slices are left out, unless the whole
// tensor is empty.
std::vector<TensorSlice> slices_of(const std::vector<TensorSlice>& slices, size_t part) {
  std::vector<TensorSlice> found;
  for (const TensorSlice& slice : slices) {
    check_slice(slice);
    const bool whole_is_empty = std::count(slice.shape.begin(), slice.shape.end(), 0) > 0;
    if (slice.elements().numel() == 0 && !whole_is_empty) continue;
    if ((is_optimizer(slice.name) ? 1 : 0) == part) found.push_back(slice);
  }
  return found;
}

// Whether some of these slices lie in a file. A copy in memory would undo what they were put there for.
bool in_file(const std::vector<TensorSlice>& slices) {
  return std::any_of(slices.begin(), slices.end(), [](const TensorSlice& slice) {
    return !slice.values.defined() && slice.in_tier.tier->in_host_memory() == 0;
  });
}

// Returns for example "model-00001-of-00004.safetensors" if four ranks write a file of the model.
std::string file_name(size_t part, const std::vector<Terms::Numbers>& writers, int rank) {
  int64_t number = 0, count = 0;
  for (size_t r = 0; r < writers.size(); ++r) {
    if (r == static_cast<size_t>(rank)) number = count;
    count += writers[r][part];
  }
  std::string name = part == 0 ? "model" : "optimizer";
  if (count > 1) {
    char numbers[64];
    std::snprintf(numbers, sizeof numbers, "-%05lld-of-%05lld", static_cast<long long>(number),
                  static_cast<long long>(count));
    name += numbers;
  }
  return name + ".safetensors";
}

void write_file(const std::string& path, const std::string& content, FileSystem& files) {
  auto file = files.create(path);
  file->write(content.data(), content.size());
  file->sync();
  file->close();
}

// Called after a failure, which is the one to report, so errors are ignored; the next save removes what is left.
void discard(const std::string& folder, FileSystem& files) {
  try {
    files.remove_all(folder);
  } catch (...) {
  }
}

std::string folder_name(int64_t step, int64_t revision) {
  char name[64];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return revision == 1 ? std::string(name) : name + ("-" + std::to_string(revision));
}

}  // namespace

CheckpointSave::CheckpointSave(CheckpointStore& store, Communicator& comm, const TrainingState& state,
                               const std::vector<TensorSlice>& slices, Writes writes,
                               std::function<void(const std::string& folder)> on_disk)
    : store_(store),
      comm_(comm),
      label_{"writing the checkpoint", state.step, "step"},
      state_(state),
      behind_(writes == Writes::kBehind),
      on_disk_(std::move(on_disk)) {
  const TraceSpan span(TraceKind::kFile, "save checkpoint");
  const std::vector<Terms::Numbers> writers = agree_together(comm, label_, [&]() -> Terms {
    if (state.step < 0) {
      throw Error(ErrorKind::kInternal, "checkpoint", "the step of a checkpoint must not be negative");
    }
    for (size_t part = 0; part < parts_.size(); ++part) {
      std::vector<TensorSlice> of_part = slices_of(slices, part);
      const bool copied = behind_ && !in_file(of_part);
      parts_[part].slices = copied ? store_.copies_[part].copy(of_part) : std::move(of_part);
    }
    return {{{"step", std::to_string(state.step)}, {"checkpoints", store_.folder_}},
            {parts_[0].slices.empty() ? 0 : 1, parts_[1].slices.empty() ? 0 : 1}};
  });
  const std::string name = text_of_first(comm, label_, [&] { return make_folder(); });
  path_ = store_.folder_ + "/" + name;
  beside_ = store_.folder_ + "/" + std::string(kTemporary) + name;
  for (size_t part = 0; part < parts_.size(); ++part) parts_[part].file = file_name(part, writers, comm.rank());
  std::exception_ptr failure;
  try {
    for (Part& part : parts_) {
      if (behind_ && in_file(part.slices)) part.early.emplace(slices_file(part));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  begin(Doing::kWrite, [this, failure] {
    if (failure) std::rethrow_exception(failure);  // here, where the ranks agree on it
    write();
  });
}

CheckpointSave::~CheckpointSave() { given_up_ = true; }

// Makes the temporary folder that the ranks will write into, and returns the checkpoint's name.
std::string CheckpointSave::make_folder() {
  const std::string& folder = store_.folder_;
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    store_.files_.make_folder(folder);
    store_.files_.sync_folder(folder_of(folder));
  }
  // Remove what an interrupted save or removal left.
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(kTemporary)) store_.files_.remove_all(it->path().string());
  }
  // There may already be a checkpoint of this step: a damaged one whose step was repeated, or the last one of a run
  // that was resumed and stopped at once. A folder cannot be replaced atomically by another, so the new one gets its
  // own name.
  int64_t revision = 1;
  for (const Entry& entry : store_.newest_first()) {
    if (entry.step == state_.step) revision = std::max(revision, entry.revision + 1);
  }
  const std::string name = folder_name(state_.step, revision);
  store_.files_.make_folder(folder + "/" + std::string(kTemporary) + name);
  return name;
}

// Begins an action of this rank; null: it has nothing to do. Without a thread it runs when its end is waited for.
void CheckpointSave::begin(Doing doing, std::function<void()> action) {
  doing_ = doing;
  std::promise<void> ended;
  try {
    if (action) {
      const auto how = behind_ ? std::launch::async : std::launch::deferred;
      action_ = std::async(how, [this, rank = trace_rank(), action = std::move(action)] {
        std::optional<TraceThread> thread;
        if (behind_) thread.emplace(rank, kWriterThread);
        const TraceSpan span(TraceKind::kFile, "write checkpoint");
        try {
          action();
        } catch (...) {
          failed_ = true;
          throw;
        }
      });
      return;
    }
    ended.set_value();
  } catch (...) {  // no thread could be started
    failed_ = true;
    ended.set_exception(std::current_exception());
  }
  action_ = ended.get_future();
}

// Waits for the action and raises what it has raised, unless it was given up because another rank has failed.
void CheckpointSave::end_action() {
  try {
    action_.get();
  } catch (const GivenUp&) {
  }
}

SlicesFile CheckpointSave::slices_file(const Part& part) {
  return {beside_, part.file, part.slices, store_.files_, store_.block_bytes_, [this] {
            if (given_up_) throw GivenUp();
          }};
}

void CheckpointSave::write() {
  Manifest manifest;
  manifest.block_bytes = store_.block_bytes_;
  for (Part& part : parts_) {
    if (part.slices.empty()) continue;
    if (!part.early) part.early.emplace(slices_file(part));
    part.early->finish(manifest);
  }
  if (!manifest.files.empty()) store_.files_.sync_folder(beside_);
  written_ = manifest_part_text(manifest);
}

// Of rank 0, once the slices of all ranks are on the disk. `parts` is what each of them has written.
void CheckpointSave::publish(const std::vector<std::string>& parts) {
  FileSystem& files = store_.files_;
  try {
    Manifest manifest{.step = state_.step,
                      .world = comm_.size(),
                      .block_bytes = store_.block_bytes_,
                      .extra = state_.extra,
                      .model = state_.model,
                      .tensors = {},
                      .files = {}};
    join_parts(parts, manifest);
    write_file(beside_ + "/manifest.json", manifest_text(manifest), files);
    files.sync_folder(beside_);
    files.rename(beside_, path_);
  } catch (...) {
    discard(beside_, files);
    throw;
  }
  files.sync_folder(store_.folder_);
  store_.known_valid_.insert(path_);
  if (on_disk_) on_disk_(path_);
}

// Begins to verify the checkpoints that are kept if all of them are valid.
void CheckpointSave::verify_next() {
  verified_.clear();
  int64_t kept = kept_, last_step = last_step_;
  bool idle = comm_.rank() > 0;
  for (size_t i = looked_at_; i < entries_.size() && kept < store_.keep_; ++i) {
    if (entries_[i].step == last_step) continue;
    verified_.push_back(i);
    last_step = entries_[i].step;
    ++kept;
    idle = idle && entries_[i].known_valid;
  }
  damages_.assign(verified_.size(), nullptr);
  const auto verify = [this] {
    for (size_t i = 0; i < verified_.size() && !given_up_; ++i) {
      const Entry& entry = entries_[verified_[i]];
      try {
        if (!entry.known_valid) {
          verified_manifest(entry.path, entry.step, CheckpointPart::kAll, comm_.rank(), comm_.size());
        } else if (comm_.rank() == 0) {
          verify_sizes(entry.path);
        }
      } catch (...) {
        damages_[i] = std::current_exception();
      }
    }
  };
  begin(Doing::kVerify, idle ? std::function<void()>() : verify);
}

bool CheckpointSave::is_valid(const Entry& entry, const std::exception_ptr& damage) {
  const auto failure = failure_of_any(comm_, label_, [&] {
    if (damage) std::rethrow_exception(damage);
  });
  if (!failure) {
    store_.known_valid_.insert(entry.path);
    return true;
  }
  // A checkpoint that cannot be read at present does not count as valid either, but it stays.
  if (failure->kind() != ErrorKind::kInput && failure->kind() != ErrorKind::kResource) throw *failure;
  store_.known_valid_.erase(entry.path);
  return false;
}

// Finds out which checkpoints are removed: those beyond the newest `keep` valid ones, and older revisions of a step.
// Damaged checkpoints never count; those newer than the oldest kept one stay, so that the damage can be examined.
void CheckpointSave::verified() {
  try {
    end_action();
  } catch (...) {
    damages_.assign(verified_.size(), std::current_exception());
  }
  for (size_t i = 0; looked_at_ < entries_.size(); ++looked_at_) {
    const Entry& entry = entries_[looked_at_];
    if (kept_ >= store_.keep_ || entry.step == last_step_) {
      doomed_.push_back(entry);
      continue;
    }
    if (i == verified_.size() || verified_[i] != looked_at_) return verify_next();  // another one was damaged
    if (!is_valid(entry, damages_[i++])) continue;
    ++kept_;
    last_step_ = entry.step;
  }
  if (doomed_.empty()) {
    doing_ = Doing::kNothing;
  } else {
    begin(Doing::kRemove, comm_.rank() == 0 ? std::function<void()>([this] { remove(); }) : nullptr);
  }
}

// Renames the folders and syncs that before removing them, so that an interrupted removal does not leave half of a
// checkpoint under its name.
void CheckpointSave::remove() {
  const std::string& folder = store_.folder_;
  std::vector<std::string> renamed;
  for (const Entry& entry : doomed_) {
    renamed.push_back(folder + "/" + std::string(kTemporary) + "old-" + fs::path(entry.path).filename().string());
    store_.known_valid_.erase(entry.path);
    store_.files_.rename(entry.path, renamed.back());
  }
  store_.files_.sync_folder(folder);
  for (const std::string& path : renamed) store_.files_.remove_all(path);
}

// Whether the action has ended on all ranks. If it has failed on one, the others need not end theirs.
bool CheckpointSave::all_have_ended() {
  constexpr int64_t kUnderWay = 0, kEnded = 1, kFailed = 2;
  const bool ended = action_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (comm_.size() == 1) return ended;
  at::Tensor all = at::empty({comm_.size(), 1}, at::kLong);
  comm_.host().all_gather(all, at::full({1}, !ended ? kUnderWay : failed_ ? kFailed : kEnded, at::kLong), label_);
  const int64_t* const of_rank = all.const_data_ptr<int64_t>();
  if (std::count(of_rank, of_rank + comm_.size(), kFailed) > 0) given_up_ = true;
  return std::count(of_rank, of_rank + comm_.size(), kUnderWay) == 0;
}

// Waits for the action on all ranks and begins the next.
void CheckpointSave::next() {
  const bool first = comm_.rank() == 0;
  switch (doing_) {
    case Doing::kWrite: {
      if (const auto failure = failure_of_any(comm_, label_, [&] { end_action(); })) {
        // All ranks have stopped writing, so the folder can be removed. If a rank had died instead, failure_of_any
        // would have raised; then the next save removes the folder.
        if (first) discard(beside_, store_.files_);
        throw *failure;
      }
      const std::vector<std::string> all = all_gather_text(comm_, written_, label_);
      begin(Doing::kPublish, first ? std::function<void()>([this, all] { publish(all); }) : nullptr);
      return;
    }
    case Doing::kPublish:
      stage(comm_, label_, [&] { end_action(); });
      doing_ = Doing::kVerify;
      entries_ = store_.newest_first(comm_, label_);
      verify_next();
      return;
    case Doing::kVerify:
      verified();
      return;
    case Doing::kRemove:
      stage(comm_, label_, [&] { end_action(); });
      doing_ = Doing::kNothing;
      return;
    case Doing::kNothing:
      return;
  }
}

void CheckpointSave::advance() {
  if (!done() && all_have_ended()) next();
}

std::string CheckpointStore::save(Communicator& comm, const TrainingState& state,
                                  const std::vector<TensorSlice>& slices) {
  CheckpointSave save(*this, comm, state, slices, CheckpointSave::Writes::kNow);
  save.finish();
  return save.folder();
}

}  // namespace annulus
