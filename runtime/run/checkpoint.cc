// See checkpoint.h.
#include "runtime/run/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include "comm/agreement.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/run/checkpoint_files.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporary = ".tmp-";

// Like failure_of_any, but raises the failure, which is the same on every rank, including the one that failed.
void stage(Communicator& comm, OpLabel label, const std::function<void()>& action) {
  if (const auto error = failure_of_any(comm, label, action)) throw *error;
}

// Returns rank 0's text on every rank.
std::string text_of_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make) {
  std::string text;
  stage(comm, label, [&] {
    if (comm.rank() == 0) text = make();
  });
  return all_gather_text(comm, text, label)[0];
}

int64_t elements_of(const TensorSlice& slice) {
  return std::accumulate(slice.shape.begin(), slice.shape.end(), int64_t{1}, std::multiplies<>());
}

void check_slice(const TensorSlice& slice) {
  const at::Tensor& values = slice.values;
  const int64_t elements = elements_of(slice);
  const bool vector = values.defined() ? values.dim() == 1 && values.is_contiguous() : slice.in_tier.tier != nullptr;
  if (vector && slice.begin >= 0 && slice.begin + slice.elements().numel() <= elements) {
    return;
  }
  throw Error(ErrorKind::kInternal, "checkpoint",
              "the slice of tensor \"" + slice.name + "\" from element " + std::to_string(slice.begin) +
                  " on is not a contiguous vector within its " + counted(elements, "element"));
}

// The slices of the model, and those of the optimizer. Empty slices are left out, unless the whole tensor is empty.
using Parts = std::array<std::vector<const TensorSlice*>, 2>;

Parts parts_of(const std::vector<TensorSlice>& slices) {
  Parts parts;
  for (const TensorSlice& slice : slices) {
    check_slice(slice);
    if (slice.elements().numel() == 0 && elements_of(slice) > 0) continue;
    parts[is_optimizer(slice.name) ? 1 : 0].push_back(&slice);
  }
  return parts;
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

// Checks only the sizes of the files, which needs no reading of their contents.
void check_sizes(const std::string& folder) {
  for (const auto& [name, said] : read_manifest(folder).files) {
    std::error_code error;
    if (fs::file_size(folder + "/" + name, error) != said.bytes || error) {
      checkpoint_damaged(folder + "/" + name, "does not have the size that was written, or is missing");
    }
  }
}

Manifest manifest_of_step(const std::string& folder, int64_t step) {
  Manifest manifest = read_manifest(folder);
  if (manifest.step != step) {
    checkpoint_damaged(folder, "its manifest is that of step " + std::to_string(manifest.step));
  }
  return manifest;
}

// Checks this rank's share of a checkpoint and returns its manifest.
Manifest checked(const std::string& folder, int64_t step, CheckpointPart part, int rank, int ranks) {
  Manifest manifest = manifest_of_step(folder, step);
  CheckpointReader(folder, manifest).check(part, rank, ranks);
  return manifest;
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

bool read_number(std::string_view text, int64_t* number) {
  *number = number_of_text<int64_t>(text).value_or(-1);
  return *number >= 0;
}

}  // namespace

CheckpointStore::CheckpointStore(std::string run_folder, int64_t keep, FileSystem& files, int64_t block_bytes)
    : folder_(std::move(run_folder) + "/checkpoints"), keep_(keep), files_(files), block_bytes_(block_bytes) {
  if (keep < 1) throw Error(ErrorKind::kUsage, "checkpoint", "checkpoint.keep must be at least 1");
}

std::optional<CheckpointStore::Entry> CheckpointStore::entry_of(const std::string& name) const {
  if (!name.starts_with("step-")) return std::nullopt;
  const size_t dash = name.find('-', 5);
  Entry entry{.path = folder_ + "/" + name};
  if (!read_number(std::string_view(name).substr(5, dash == std::string::npos ? dash : dash - 5), &entry.step)) {
    return std::nullopt;
  }
  if (dash != std::string::npos && !read_number(std::string_view(name).substr(dash + 1), &entry.revision)) {
    return std::nullopt;
  }
  entry.known_valid = known_valid_.contains(entry.path);
  return entry;
}

std::vector<CheckpointStore::Entry> CheckpointStore::newest_first() const {
  std::vector<Entry> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    if (const auto entry = entry_of(it->path().filename().string())) entries.push_back(*entry);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw Error(ErrorKind::kResource, "checkpoint", folder_ + " cannot be read: " + error.message());
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.step, a.revision) > std::tie(b.step, b.revision); });
  return entries;
}

std::vector<CheckpointStore::Entry> CheckpointStore::newest_first(std::optional<int64_t> step) const {
  const std::vector<Entry> all = newest_first();
  std::vector<Entry> meant;
  std::vector<std::string> steps;
  for (const Entry& entry : all) {
    if (!step || entry.step == *step) meant.push_back(entry);
    const std::string name = std::to_string(entry.step);
    if (steps.empty() || steps.back() != name) steps.push_back(name);
  }
  if (!meant.empty()) return meant;
  if (!step) throw Error(ErrorKind::kInput, "checkpoint", folder_ + " holds no checkpoint");
  std::reverse(steps.begin(), steps.end());
  throw Error(ErrorKind::kInput, "checkpoint",
              folder_ + " holds no checkpoint of step " + std::to_string(*step) +
                  (steps.empty() ? "; it holds none" : "; it holds those of steps " + join(steps, ", ")));
}

// Returns rank 0's list on every rank, because ranks with different lists would call different collectives.
std::vector<CheckpointStore::Entry> CheckpointStore::newest_first(Communicator& comm, OpLabel label) const {
  const std::string lines = text_of_first(comm, label, [&] {
    std::string text;
    for (const Entry& entry : newest_first()) {
      text += (entry.known_valid ? "+" : "-") + fs::path(entry.path).filename().string() + "\n";
    }
    return text;
  });
  std::vector<Entry> entries;
  for (size_t at = 0; at < lines.size();) {
    const size_t end = lines.find('\n', at);
    Entry entry = *entry_of(lines.substr(at + 1, end - at - 1));
    entry.known_valid = lines[at] == '+';
    entries.push_back(std::move(entry));
    at = end + 1;
  }
  return entries;
}

void CheckpointStore::require_writable() const {
  if (faccessat(AT_FDCWD, folder_.c_str(), W_OK | X_OK, AT_EACCESS) == 0 || errno == ENOENT) return;
  throw Error(ErrorKind::kResource, "checkpoint", folder_ + " cannot be written: " + std::strerror(errno));
}

// Makes the temporary folder that the ranks will write into, and returns its final name.
std::string CheckpointStore::begin_save(int64_t step) {
  std::error_code error;
  if (!fs::is_directory(folder_, error)) {
    files_.make_folder(folder_);
    files_.sync_folder(folder_of(folder_));
  }
  // Remove what an interrupted save or removal left.
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(kTemporary)) files_.remove_all(it->path().string());
  }
  // There may already be a checkpoint of this step: a damaged one whose step was repeated, or the last one of a run
  // that was resumed and stopped at once. A folder cannot be replaced atomically by another, so the new one gets its
  // own name.
  int64_t revision = 1;
  for (const Entry& entry : newest_first()) {
    if (entry.step == step) revision = std::max(revision, entry.revision + 1);
  }
  const std::string name = folder_name(step, revision);
  files_.make_folder(folder_ + "/" + std::string(kTemporary) + name);
  return name;
}

std::string CheckpointStore::save(Communicator& comm, const TrainingState& state,
                                  const std::vector<TensorSlice>& slices) {
  const OpLabel label{"writing the checkpoint", state.step, "step"};
  const bool first = comm.rank() == 0;
  Parts parts;
  const std::vector<Terms::Numbers> writers = agree_together(comm, label, [&]() -> Terms {
    if (state.step < 0)
      throw Error(ErrorKind::kInternal, "checkpoint", "the step of a checkpoint must not be negative");
    parts = parts_of(slices);
    return {{{"step", std::to_string(state.step)}, {"checkpoints", folder_}},
            {parts[0].empty() ? 0 : 1, parts[1].empty() ? 0 : 1}};
  });
  const std::string name = text_of_first(comm, label, [&] { return begin_save(state.step); });
  const std::string path = folder_ + "/" + name;
  const std::string beside = folder_ + "/" + std::string(kTemporary) + name;

  Manifest manifest{.step = state.step,
                    .world = comm.size(),
                    .block_bytes = block_bytes_,
                    .extra = state.extra,
                    .model = state.model,
                    .tensors = {},
                    .files = {}};
  std::string written;
  const auto failure = failure_of_any(comm, label, [&] {
    for (size_t part = 0; part < parts.size(); ++part) {
      if (!parts[part].empty()) {
        write_slices(beside, file_name(part, writers, comm.rank()), parts[part], files_, manifest);
      }
    }
    if (!manifest.files.empty()) files_.sync_folder(beside);
    written = manifest_part_text(manifest);
  });
  if (failure) {
    // All ranks have stopped writing, so the folder can be removed. If a rank had died instead, failure_of_any would
    // have raised; then the next save removes the folder.
    if (first) discard(beside, files_);
    throw *failure;
  }
  const std::vector<std::string> all = all_gather_text(comm, written, label);
  stage(comm, label, [&] {
    if (!first) return;
    try {
      manifest.tensors.clear();
      manifest.files.clear();
      join_parts(all, manifest);
      write_file(beside + "/manifest.json", manifest_text(manifest), files_);
      files_.sync_folder(beside);
      files_.rename(beside, path);
    } catch (...) {
      discard(beside, files_);
      throw;
    }
    files_.sync_folder(folder_);
    known_valid_.insert(path);
  });
  remove_old(comm, label);
  return path;
}

bool CheckpointStore::valid(Communicator& comm, OpLabel label, const Entry& entry) {
  const auto failure = failure_of_any(comm, label, [&] {
    if (!entry.known_valid) {
      checked(entry.path, entry.step, CheckpointPart::kAll, comm.rank(), comm.size());
    } else if (comm.rank() == 0) {
      check_sizes(entry.path);
    }
  });
  if (!failure) {
    known_valid_.insert(entry.path);
    return true;
  }
  // A checkpoint that cannot be read at present does not count as valid either, but it stays.
  if (failure->kind() != ErrorKind::kInput && failure->kind() != ErrorKind::kResource) throw *failure;
  known_valid_.erase(entry.path);
  return false;
}

void CheckpointStore::remove_old(Communicator& comm, OpLabel label) {
  int64_t kept = 0;
  int64_t last_step = -1;
  std::vector<Entry> doomed;
  for (const Entry& entry : newest_first(comm, label)) {
    // Remove checkpoints beyond the newest `keep` valid ones, and older revisions of a step. Damaged checkpoints never
    // count; those newer than the oldest kept one stay, so that the damage can be examined.
    const bool superseded = entry.step == last_step;
    if (kept >= keep_ || superseded) {
      doomed.push_back(entry);
    } else if (valid(comm, label, entry)) {
      ++kept;
      last_step = entry.step;
    }
  }
  if (doomed.empty()) return;
  stage(comm, label, [&] {
    if (comm.rank() == 0) remove_doomed(doomed);
  });
}

// Renames the folders and syncs that before removing them, so that an interrupted removal does not leave half of a
// checkpoint under its name.
void CheckpointStore::remove_doomed(const std::vector<Entry>& doomed) {
  std::vector<std::string> renamed;
  for (const Entry& entry : doomed) {
    renamed.push_back(folder_ + "/" + std::string(kTemporary) + "old-" + fs::path(entry.path).filename().string());
    known_valid_.erase(entry.path);
    files_.rename(entry.path, renamed.back());
  }
  files_.sync_folder(folder_);
  for (const std::string& path : renamed) files_.remove_all(path);
}

TrainingState CheckpointStore::opened(const Entry& entry, Manifest manifest) {
  TrainingState state{.step = manifest.step, .extra = manifest.extra, .model = manifest.model, .folder = entry.path};
  opened_ = entry.path;
  manifest_ = std::make_shared<const Manifest>(std::move(manifest));
  return state;
}

TrainingState CheckpointStore::open(int64_t step, CheckpointPart part) {
  std::optional<Error> damage;
  for (const Entry& entry : newest_first(step)) {
    try {
      return opened(entry, checked(entry.path, step, part, 0, 1));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInput) throw;
      if (!damage) damage = error;
    }
  }
  throw *damage;
}

std::optional<TrainingState> CheckpointStore::open_newest_valid(Communicator& comm, std::vector<std::string>* skipped,
                                                                CheckpointPart part) {
  const OpLabel label{"reading the checkpoint"};
  std::vector<Entry> entries = newest_first(comm, label);
  for (;;) {
    std::vector<std::string> reasons;
    std::optional<TrainingState> found;
    for (const Entry& entry : entries) {
      Manifest manifest;
      const auto failure = failure_of_any(
          comm, label, [&] { manifest = checked(entry.path, entry.step, part, comm.rank(), comm.size()); });
      if (!failure) {
        found = opened(entry, std::move(manifest));
        if (part == CheckpointPart::kAll) known_valid_.insert(entry.path);
        break;
      }
      if (failure->kind() != ErrorKind::kInput) throw *failure;
      reasons.emplace_back(failure->what());
    }
    // A running job may have saved a newer checkpoint and removed the listed ones while they were read; then look
    // again.
    std::vector<Entry> now;
    if (!found) now = newest_first(comm, label);
    const bool changed = !std::equal(entries.begin(), entries.end(), now.begin(), now.end(),
                                     [](const Entry& a, const Entry& b) { return a.path == b.path; });
    if (!found && changed) {
      entries = std::move(now);
      continue;
    }
    if (skipped) skipped->insert(skipped->end(), reasons.begin(), reasons.end());
    return found;
  }
}

void CheckpointStore::read(const TrainingState& state, const std::vector<TensorSlice>& into) {
  if (opened_ != state.folder) {
    manifest_ = std::make_shared<const Manifest>(manifest_of_step(state.folder, state.step));
    opened_ = state.folder;
  }
  const std::string hint = "; was it made with another [model]?";
  for (const TensorSlice& to : into) {
    check_slice(to);
    const ManifestTensor* from = manifest_->find(to.name);
    if (!from) throw Error(ErrorKind::kInput, "checkpoint", "the checkpoint holds no tensor " + to.name + hint);
    const at::ScalarType dtype = to.elements().scalar_type();
    const bool converts = c10::isFloatingType(from->dtype) && c10::isFloatingType(dtype);
    if (from->shape != to.shape || (from->dtype != dtype && !converts)) {
      throw Error(ErrorKind::kInput, "checkpoint",
                  to.name + " is " + c10::str(from->dtype, " ", list_text(from->shape)) +
                      ", but the configuration needs " + c10::str(dtype, " ", list_text(to.shape)) + hint);
    }
  }
  CheckpointReader reader(state.folder, *manifest_);
  for (const TensorSlice& to : into) {
    const PlacedVector values = to.elements();
    const ManifestTensor& from = *manifest_->find(to.name);
    reader.read(from, to.begin, to.begin + values.numel(), [&](int64_t begin, int64_t end, const void* data) {
      values.write(begin - to.begin,
                   at::from_blob(const_cast<void*>(data), {end - begin}, at::TensorOptions(from.dtype)));
    });
  }
}

}  // namespace annulus
