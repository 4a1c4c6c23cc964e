// See checkpoint_merge.h.
#include "training/run/checkpoint_merge.h"

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/interrupt.h"
#include "tensor_files/safetensors.h"
#include "training/run/checkpoint_files.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Tensors = std::vector<const ManifestTensor*>;

void write_tensors(CheckpointReader& reader, const Manifest& manifest, const Tensors& tensors, const std::string& path,
                   FileSystem& files) {
  std::vector<TensorInfo> infos;
  for (const ManifestTensor* tensor : tensors) infos.push_back({tensor->name, tensor->dtype, tensor->shape, 0, 0});
  SafetensorsWriter writer(path, std::move(infos), {{"format", "pt"}}, files);
  for (const TensorInfo& info : writer.tensors()) {
    const ManifestTensor& tensor = *manifest.find(info.name);
    const auto size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    reader.read(tensor, 0, tensor.elements(), [&](int64_t begin, int64_t end, const void* data) {
      if (interrupted()) throw Error(ErrorKind::kResource, "checkpoint", "merging was interrupted: nothing is kept");
      writer.write(data, static_cast<uint64_t>((end - begin) * size));
    });
  }
  writer.finish();
}

// In order, a new file where the next tensor would be too many bytes.
std::vector<Tensors> shares(const Tensors& tensors, int64_t max_file_bytes) {
  std::vector<Tensors> files;
  int64_t bytes = 0;
  for (const ManifestTensor* tensor : tensors) {
    if (files.empty() || bytes + tensor->bytes() > max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(tensor);
    bytes += tensor->bytes();
  }
  return files;
}

// The names of the files.
std::vector<std::string> write_set(CheckpointReader& reader, const Manifest& manifest, const Tensors& tensors,
                                   int64_t max_file_bytes, const std::string& folder, FileSystem& files) {
  const std::vector<Tensors> set = shares(tensors, max_file_bytes);
  std::vector<std::string> names;
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total = 0;
  for (size_t i = 0; i < set.size(); ++i) {
    char name[64] = "model.safetensors";
    if (set.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, set.size());
    write_tensors(reader, manifest, set[i], folder + "/" + name, files);
    names.emplace_back(name);
    for (const ManifestTensor* tensor : set[i]) {
      weight_map[tensor->name] = name;
      total += tensor->bytes();
    }
  }
  if (set.size() > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    names.emplace_back("model.safetensors.index.json");
    write_atomically(files, folder + "/" + names.back(), index.dump(2) + "\n");
  }
  files.sync_folder(folder);
  return names;
}

}  // namespace

std::vector<std::string> merge_checkpoint(const std::string& folder, const Manifest& manifest, const std::string& out,
                                          std::optional<int64_t> max_file_bytes, FileSystem& files) {
  // "merged/" names the folder "merged".
  std::string path = out;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  std::error_code unknown;
  if (fs::exists(fs::symlink_status(path, unknown))) {
    throw Error(ErrorKind::kUsage, "checkpoint", "--out " + out + " is there already: name what is not, or remove it");
  }
  require_output("checkpoint", "--out " + out, path);
  Tensors tensors;
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (!is_optimizer(tensor.name)) tensors.push_back(&tensor);
  }
  CheckpointReader reader(folder, manifest);
  if (!max_file_bytes) {
    replace_file(files, path,
                 [&](const std::string& beside) { write_tensors(reader, manifest, tensors, beside, files); });
    return {path};
  }
  const std::string beside = temporary_beside(path);
  std::vector<std::string> written;
  try {
    files.make_folder(beside);
    written = write_set(reader, manifest, tensors, *max_file_bytes, beside, files);
    files.rename(beside, path);
  } catch (...) {
    try {
      files.remove_all(beside);
    } catch (...) {  // the first failure is the one to report
    }
    throw;
  }
  files.sync_folder(folder_of(path));
  for (std::string& name : written) name = path + "/" + name;
  return written;
}

}  // namespace annulus
