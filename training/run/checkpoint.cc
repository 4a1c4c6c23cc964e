// See checkpoint.h.
#include "training/run/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <system_error>
#include <tuple>

#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"
#include "tensor_files/bounded_json.h"
#include "tensor_files/safetensors.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kFormat = "annulus-checkpoint";
constexpr int kVersion = 1;
constexpr uintmax_t kLargestManifest = 256 << 20;
constexpr std::string_view kTemporary = ".tmp-";
constexpr std::string_view kOptimizer = "optimizer.";
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";

// Damage: the checkpoint is passed over, with this reason.
[[noreturn]] void damaged(const std::string& path, const std::string& message) {
  throw Error(ErrorKind::kInput, "checkpoint", path + ": " + message);
}

// What cannot be read, for the system's `reason`. What is not there or no file is damage; but what may be whole, behind
// a missing permission or a failing disk, must not be passed over as if it were not.
[[noreturn]] void unreadable(const std::string& path, const std::error_code& reason) {
  throw Error(kind_of_errno(reason.value()), "checkpoint", path + ": cannot be read: " + reason.message());
}

// Of a file that can be opened.
uintmax_t size_of(const std::string& path) {
  std::error_code error;
  const uintmax_t bytes = fs::file_size(path, error);
  if (error) unreadable(path, error);
  // O_NONBLOCK: a named pipe has no size, but should not be waited for either.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) unreadable(path, {errno, std::generic_category()});
  ::close(fd);
  return bytes;
}

const char* file_of(const std::string& tensor) { return tensor.starts_with(kOptimizer) ? kOptimizerFile : kModelFile; }

// The manifest's checksum: of everything else in it, as it would be written.
std::string manifest_checksum(Json manifest) {
  manifest.erase("checksum");
  const std::string text = manifest.dump();
  return checksum(text.data(), text.size());
}

Json read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  if (size_of(path) > kLargestManifest) damaged(path, "is too large to be a manifest");
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  Json manifest;
  try {
    // Nesting is bounded so that a damaged file cannot take memory out of proportion.
    manifest = parse_bounded_json(text.str(), 9);
    if (manifest.at("format").get<std::string>() != kFormat) damaged(path, "is no annulus checkpoint");
    if (manifest.at("version").get<int>() != kVersion) {
      damaged(path,
              "has version " + manifest["version"].dump() + ", this program reads version " + std::to_string(kVersion));
    }
    if (manifest.at("checksum").get<std::string>() != manifest_checksum(manifest)) {
      damaged(path, "its checksum does not match: it was damaged or changed");
    }
  } catch (const JsonRefused& what) {
    damaged(path, std::string("is malformed: ") + what.what());
  } catch (const Json::exception& what) {
    damaged(path, std::string("is malformed: ") + what.what());
  }
  return manifest;
}

using Sink = std::function<void(NamedTensor)>;

// Checks everything that the manifest says about one file; hands its tensors on one by one.
void read_file(const std::string& folder, const std::string& name, const Json& manifest, const Sink& sink) {
  if (name.find('/') != std::string::npos || name.empty() || name[0] == '.') {
    damaged(folder + "/manifest.json", "names the file \"" + name + "\"");
  }
  const std::string path = folder + "/" + name;
  const Json& said = manifest.at("files").at(name);
  const uintmax_t bytes = size_of(path);
  if (bytes != said.at("bytes").get<uintmax_t>()) {
    damaged(path, "has " + std::to_string(bytes) + " bytes, " + said["bytes"].dump() + " were written");
  }
  const SafetensorsFile file(path);
  if (checksum(file.header().data(), file.header().size()) != said.at("header_xxh3_128").get<std::string>()) {
    damaged(path, "the checksum of its header does not match");
  }
  size_t count = 0;
  for (const Json& tensor : manifest.at("tensors")) {
    const Json& slices = tensor.at("slices");
    const auto in_file = std::count_if(slices.begin(), slices.end(),
                                       [&](const Json& slice) { return slice.at("file").get<std::string>() == name; });
    if (in_file == 0) continue;
    const auto tensor_name = tensor.at("name").get<std::string>();
    const auto shape = tensor.at("shape").get<std::vector<int64_t>>();
    const Json& slice = slices.at(0);
    // The format allows a tensor in parts; nothing writes one yet.
    if (slices.size() != 1 || slice.at("shape").get<std::vector<int64_t>>() != shape ||
        slice.at("offset").get<std::vector<int64_t>>() != std::vector<int64_t>(shape.size(), 0)) {
      damaged(path, "tensor \"" + tensor_name + "\" is in parts, this program reads whole tensors alone");
    }
    const TensorInfo* info = file.find(tensor_name);
    if (!info || info->shape != shape || safetensors_dtype(info->dtype) != tensor.at("dtype").get<std::string>()) {
      damaged(path, "tensor \"" + tensor_name + "\" is not as the manifest says");
    }
    at::Tensor data = file.load(tensor_name);
    if (checksum(data.data_ptr(), info->bytes) != slice.at("xxh3_128").get<std::string>()) {
      damaged(path, "the checksum of tensor \"" + tensor_name + "\" does not match");
    }
    ++count;
    sink({tensor_name, std::move(data)});
  }
  if (count != file.tensors().size()) damaged(path, "holds tensors that the manifest does not name");
}

// Everything but the tensors, which go to the sink. Raises Error(kInput) where anything is not as it was written.
TrainingState read_checkpoint(const std::string& folder, int64_t step, CheckpointPart part, const Sink& sink) {
  const Json manifest = read_manifest(folder);
  try {
    TrainingState state;
    state.step = manifest.at("step").get<int64_t>();
    if (state.step != step) damaged(folder, "its manifest is that of step " + std::to_string(state.step));
    state.extra = manifest.at("extra").get<std::map<std::string, std::string>>();
    for (const auto& [name, said] : manifest.at("files").items()) {
      if (part == CheckpointPart::kAll || name == kModelFile) read_file(folder, name, manifest, sink);
    }
    return state;
  } catch (const Json::exception& what) {
    damaged(folder + "/manifest.json", std::string("is malformed: ") + what.what());
  }
}

// Sizes alone: what can be seen without reading everything.
void check_sizes(const std::string& folder) {
  const Json manifest = read_manifest(folder);
  try {
    for (const auto& [name, said] : manifest.at("files").items()) {
      std::error_code error;
      if (fs::file_size(folder + "/" + name, error) != said.at("bytes").get<uintmax_t>() || error) {
        damaged(folder + "/" + name, "is not as it was written");
      }
    }
  } catch (const Json::exception& what) {
    damaged(folder + "/manifest.json", std::string("is malformed: ") + what.what());
  }
}

void write_file(const std::string& path, const std::string& content, FileSystem& files) {
  auto file = files.create(path);
  file->write(content.data(), content.size());
  file->sync();
  file->close();
}

// Writes all files of a checkpoint into a folder that is there, and the manifest last.
void write_checkpoint(const std::string& folder, const TrainingState& state, FileSystem& files) {
  Json manifest;
  manifest["format"] = kFormat;
  manifest["version"] = kVersion;
  manifest["step"] = state.step;
  manifest["extra"] = state.extra;
  manifest["tensors"] = Json::array();
  manifest["files"] = Json::object();
  for (const char* name : {kModelFile, kOptimizerFile}) {
    std::vector<NamedTensor> tensors;
    std::copy_if(state.tensors.begin(), state.tensors.end(), std::back_inserter(tensors),
                 [&](const NamedTensor& t) { return file_of(t.name) == std::string_view(name); });
    if (tensors.empty()) continue;
    uint64_t data_bytes = 0;
    const std::string path = folder + "/" + name;
    const std::string header =
        write_safetensors_file(path, tensors, {{"format", "pt"}}, files, [&](const TensorInfo& info, const void* data) {
          data_bytes += info.bytes;
          manifest["tensors"].push_back(
              {{"name", info.name},
               {"dtype", safetensors_dtype(info.dtype)},
               {"shape", info.shape},
               {"slices", Json::array({{{"file", name},
                                        {"offset", std::vector<int64_t>(info.shape.size(), 0)},
                                        {"shape", info.shape},
                                        {"xxh3_128", checksum(data, info.bytes)}}})}});
        });
    manifest["files"][name] = {{"bytes", header.size() + data_bytes},
                               {"header_xxh3_128", checksum(header.data(), header.size())}};
  }
  try {
    manifest["checksum"] = manifest_checksum(manifest);
    write_file(folder + "/manifest.json", manifest.dump(1) + "\n", files);
  } catch (const Json::exception& what) {
    throw Error(ErrorKind::kInternal, "checkpoint", std::string("what is to be saved is no text: ") + what.what());
  }
  files.sync_folder(folder);
}

std::string folder_name(int64_t step, int64_t revision) {
  char name[64];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return revision == 1 ? std::string(name) : name + ("-" + std::to_string(revision));
}

bool read_number(std::string_view text, int64_t* number) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return !text.empty() && error == std::errc() && stop == text.data() + text.size() && *number >= 0;
}

}  // namespace

CheckpointStore::CheckpointStore(std::string run_folder, int64_t keep, FileSystem& files)
    : folder_(std::move(run_folder) + "/checkpoints"), keep_(keep), files_(files) {
  if (keep < 1) throw Error(ErrorKind::kUsage, "checkpoint", "checkpoint.keep must be at least 1");
}

std::vector<CheckpointStore::Entry> CheckpointStore::newest_first() const {
  std::vector<Entry> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("step-")) continue;
    const size_t dash = name.find('-', 5);
    Entry entry{folder_ + "/" + name, 0, 1};
    if (!read_number(std::string_view(name).substr(5, dash == std::string::npos ? dash : dash - 5), &entry.step)) {
      continue;
    }
    if (dash != std::string::npos && !read_number(std::string_view(name).substr(dash + 1), &entry.revision)) continue;
    entries.push_back(std::move(entry));
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw Error(ErrorKind::kResource, "checkpoint", folder_ + " cannot be read: " + error.message());
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::tie(a.step, a.revision) > std::tie(b.step, b.revision); });
  return entries;
}

TrainingState CheckpointStore::read_all(const Entry& entry, CheckpointPart part) {
  std::vector<NamedTensor> tensors;
  TrainingState state =
      read_checkpoint(entry.path, entry.step, part, [&](NamedTensor tensor) { tensors.push_back(std::move(tensor)); });
  state.tensors = std::move(tensors);
  state.folder = entry.path;
  if (part == CheckpointPart::kAll) known_valid_.insert(entry.path);
  return state;
}

void CheckpointStore::require_writable() const {
  if (faccessat(AT_FDCWD, folder_.c_str(), W_OK | X_OK, AT_EACCESS) == 0 || errno == ENOENT) return;
  throw Error(ErrorKind::kResource, "checkpoint", folder_ + " cannot be written: " + std::strerror(errno));
}

std::string CheckpointStore::save(const TrainingState& state) {
  if (state.step < 0) throw Error(ErrorKind::kInternal, "checkpoint", "negative step");
  std::error_code error;
  if (!fs::is_directory(folder_, error)) {
    files_.make_folder(folder_);
    files_.sync_folder(folder_of(folder_));
  }
  // What a save or a removal left that did not end.
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(kTemporary)) files_.remove_all(it->path().string());
  }
  // A step may be there already: a damaged one that was trained again, or the end of a run that was resumed at once. A
  // folder cannot be replaced by another in one step, so the new one gets a name of its own.
  int64_t revision = 1;
  for (const Entry& entry : newest_first()) {
    if (entry.step == state.step) revision = std::max(revision, entry.revision + 1);
  }
  const std::string name = folder_name(state.step, revision);
  const std::string path = folder_ + "/" + name;
  const std::string beside = folder_ + "/" + std::string(kTemporary) + name;
  try {
    files_.make_folder(beside);
    write_checkpoint(beside, state, files_);
    files_.rename(beside, path);
  } catch (...) {
    try {
      files_.remove_all(beside);
    } catch (...) {  // the first failure is the one to report; the next save removes it
    }
    throw;
  }
  files_.sync_folder(folder_);
  known_valid_.insert(path);
  remove_old();
  return path;
}

bool CheckpointStore::valid(const Entry& entry) {
  try {
    if (known_valid_.contains(entry.path)) {
      check_sizes(entry.path);
    } else {
      // Read in full, once; one tensor at a time is in memory.
      read_checkpoint(entry.path, entry.step, CheckpointPart::kAll, [](const NamedTensor&) {});
      known_valid_.insert(entry.path);
    }
    return true;
  } catch (const Error& error) {
    // One that cannot be read now is not counted either; it stays.
    if (error.kind() != ErrorKind::kInput && error.kind() != ErrorKind::kResource) throw;
    known_valid_.erase(entry.path);
    return false;
  }
}

void CheckpointStore::remove_old() {
  int64_t kept = 0;
  int64_t last_step = -1;
  std::vector<std::string> doomed;
  for (const Entry& entry : newest_first()) {
    // An older writing of a step that is there anew, or beyond the newest `keep`. Damaged ones never count; those newer
    // than the oldest kept one stay, for whoever wants to know what happened.
    const bool superseded = entry.step == last_step;
    if (kept < keep_ && !superseded) {
      if (valid(entry)) {
        ++kept;
        last_step = entry.step;
      }
      continue;
    }
    // Renamed first, and that put on the disk: a removal that is cut off must not leave half a checkpoint that looks
    // like one.
    doomed.push_back(folder_ + "/" + std::string(kTemporary) + "old-" + fs::path(entry.path).filename().string());
    known_valid_.erase(entry.path);
    files_.rename(entry.path, doomed.back());
  }
  if (doomed.empty()) return;
  files_.sync_folder(folder_);
  for (const std::string& path : doomed) files_.remove_all(path);
}

TrainingState CheckpointStore::load(int64_t step, CheckpointPart part) {
  std::optional<Error> damage;
  std::vector<std::string> steps;
  for (const Entry& entry : newest_first()) {
    const std::string name = std::to_string(entry.step);
    if (steps.empty() || steps.back() != name) steps.push_back(name);
    if (entry.step != step) continue;
    try {
      return read_all(entry, part);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInput) throw;
      if (!damage) damage = error;
    }
  }
  if (damage) throw *damage;
  std::reverse(steps.begin(), steps.end());
  throw Error(ErrorKind::kInput, "checkpoint",
              folder_ + " holds no checkpoint of step " + std::to_string(step) +
                  (steps.empty() ? "; it holds none" : "; it holds those of steps " + join(steps, ", ")));
}

std::optional<TrainingState> CheckpointStore::load_newest_valid(std::vector<std::string>* skipped,
                                                                CheckpointPart part) {
  std::vector<Entry> entries = newest_first();
  for (;;) {
    std::vector<std::string> reasons;
    std::optional<TrainingState> found;
    for (const Entry& entry : entries) {
      try {
        found = read_all(entry, part);
        break;
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kInput) throw;
        reasons.push_back(error.what());
      }
    }
    // A live run may have saved a newer one and removed the ones listed while they were read: then look again.
    std::vector<Entry> now;
    if (!found) now = newest_first();
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

}  // namespace annulus
