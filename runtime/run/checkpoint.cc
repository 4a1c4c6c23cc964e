// See checkpoint.h.
#include "runtime/run/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
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
#include "runtime/run/checkpoint_stages.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

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
      return opened(entry, verified_manifest(entry.path, step, part, 0, 1));
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
          comm, label, [&] { manifest = verified_manifest(entry.path, entry.step, part, comm.rank(), comm.size()); });
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
