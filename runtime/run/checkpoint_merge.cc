// See checkpoint_merge.h.
#include "runtime/run/checkpoint_merge.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/interrupt.h"
#include "runtime/run/checkpoint_files.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Tensors = std::vector<const ManifestTensor*>;

constexpr int64_t kRounded = 1 << 18;  // the number of elements converted at once; a block has millions

at::ScalarType dtype_of(const ManifestTensor& tensor, const Merging& to) { return to.dtype.value_or(tensor.dtype); }

int64_t bytes_of(const ManifestTensor& tensor, const Merging& to) {
  return tensor.elements() * static_cast<int64_t>(c10::elementSize(dtype_of(tensor, to)));
}

void write_tensors(CheckpointReader& reader, const Manifest& manifest, const Tensors& tensors, const Merging& to,
                   const std::string& path, FileSystem& files) {
  std::vector<TensorInfo> infos;
  for (const ManifestTensor* tensor : tensors) {
    infos.push_back({tensor->name, dtype_of(*tensor, to), tensor->shape, 0, 0});
  }
  SafetensorsWriter writer(path, std::move(infos), {{"format", "pt"}}, files);
  for (const TensorInfo& info : writer.tensors()) {
    const ManifestTensor& tensor = *manifest.find(info.name);
    const at::TensorOptions stored = at::TensorOptions().dtype(tensor.dtype);
    reader.read(tensor, 0, tensor.elements(), [&](int64_t begin, int64_t end, const void* data) {
      if (interrupted())
        throw Error(ErrorKind::kResource, "checkpoint", "merging was interrupted; nothing was written");
      const at::Tensor block = at::from_blob(const_cast<void*>(data), {end - begin}, stored);
      for (int64_t at = 0; at < end - begin; at += kRounded) {
        const at::Tensor values = block.narrow(0, at, std::min(kRounded, end - begin - at)).to(info.dtype);
        writer.write(values.const_data_ptr(), values.nbytes());
      }
    });
  }
  writer.finish();
}

// Divides the tensors among files in order, beginning a new file when the next tensor would exceed the limit.
std::vector<Tensors> shares(const Tensors& tensors, const Merging& to) {
  std::vector<Tensors> files;
  int64_t bytes = 0;
  for (const ManifestTensor* tensor : tensors) {
    const int64_t more = bytes_of(*tensor, to);
    if (files.empty() || bytes + more > *to.max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(tensor);
    bytes += more;
  }
  return files;
}

// Writes the files of a folder and returns their names.
std::vector<std::string> write_set(CheckpointReader& reader, const Manifest& manifest, const Tensors& tensors,
                                   const Merging& to, const std::string& folder, FileSystem& files) {
  const std::vector<Tensors> set = shares(tensors, to);
  std::vector<std::string> names;
  nlohmann::json weight_map = nlohmann::json::object();
  int64_t total = 0;
  for (size_t i = 0; i < set.size(); ++i) {
    char name[64] = "model.safetensors";
    if (set.size() > 1) std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, set.size());
    write_tensors(reader, manifest, set[i], to, folder + "/" + name, files);
    names.emplace_back(name);
    for (const ManifestTensor* tensor : set[i]) {
      weight_map[tensor->name] = name;
      total += bytes_of(*tensor, to);
    }
  }
  if (set.size() > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    names.emplace_back("model.safetensors.index.json");
    write_atomically(files, folder + "/" + names.back(), index.dump(2) + "\n");
  }
  if (to.add_files) to.add_files(folder, files);
  files.sync_folder(folder);
  return names;
}

}  // namespace

std::vector<std::string> merge_checkpoint(const std::string& folder, const Manifest& manifest, const Merging& to,
                                          FileSystem& files) {
  // "merged/" names the folder "merged".
  std::string path = to.out;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const std::string named = to.named.empty() ? to.out : to.named;
  std::error_code unknown;
  if (fs::exists(fs::symlink_status(path, unknown))) {
    throw Error(ErrorKind::kUsage, "checkpoint", named + " already exists: name another path, or remove it");
  }
  require_output("checkpoint", named, path);
  Tensors tensors;
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (!is_optimizer(tensor.name)) tensors.push_back(&tensor);
  }
  CheckpointReader reader(folder, manifest);
  if (!to.max_file_bytes) {
    replace_file(files, path,
                 [&](const std::string& beside) { write_tensors(reader, manifest, tensors, to, beside, files); });
    return {path};
  }
  const std::string beside = temporary_beside(path);
  std::vector<std::string> written;
  try {
    files.make_folder(beside);
    written = write_set(reader, manifest, tensors, to, beside, files);
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

void use_newest_whole(const std::vector<CheckpointStore::Entry>& newest_first,
                      const std::function<void(const CheckpointStore::Entry&, const Manifest&)>& use,
                      const std::function<void(const std::string&)>& passed_over) {
  for (const CheckpointStore::Entry& entry : newest_first) {
    try {
      use(entry, read_manifest(entry.path));
      return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInput || &entry == &newest_first.back()) throw;
      passed_over(error.what());
    }
  }
}

}  // namespace annulus
