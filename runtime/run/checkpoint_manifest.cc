// See checkpoint_manifest.h.
#include "runtime/run/checkpoint_manifest.h"

#include <c10/core/ScalarType.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "common/checked_json.h"
#include "common/checksum.h"
#include "common/descriptor.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kFormat = "annulus-checkpoint";
constexpr int64_t kVersion = 2;
constexpr size_t kLargestManifest = size_t{1} << 30;

std::string range_text(int64_t begin, int64_t end) {
  return "[" + std::to_string(begin) + ":" + std::to_string(end) + "]";
}

// Returns the manifest's checksum, which covers everything else in it as it would be written.
std::string checksum_of(Json manifest) {
  manifest.erase("checksum");
  const std::string text = manifest.dump();
  return checksum(text.data(), text.size());
}

// Sorts the slices, and returns an error message unless each element lies in exactly one of them. A tensor without
// elements may have any number of slices.
std::optional<std::string> wrong_ranges(ManifestTensor& tensor) {
  std::ranges::sort(tensor.slices, [](const ManifestSlice& a, const ManifestSlice& b) {
    return std::tie(a.begin, a.end, a.file) < std::tie(b.begin, b.end, b.file);
  });
  const std::string name = "tensor \"" + tensor.name + "\": ";
  const int64_t elements = tensor.elements();
  int64_t at = 0;
  for (const ManifestSlice& slice : tensor.slices) {
    const bool empty = slice.begin == slice.end;
    if (slice.begin < 0 || slice.end > elements || slice.begin > slice.end || (empty && elements > 0)) {
      return name + "elements " + range_text(slice.begin, slice.end) + " in " + slice.file + " are not within its " +
             std::to_string(elements);
    }
    if (slice.begin > at) return name + "elements " + range_text(at, slice.begin) + " are in no slice";
    if (slice.begin < at) {
      return name + "elements " + range_text(slice.begin, std::min(at, slice.end)) + " are in several slices, one of " +
             "them in " + slice.file;
    }
    at = slice.end;
  }
  if (at < elements) return name + "elements " + range_text(at, elements) + " are in no slice";
  return std::nullopt;
}

// Returns nothing if there are too many elements for any tensor.
std::optional<int64_t> elements_of(const std::vector<int64_t>& shape, int64_t element_bytes) {
  int64_t product = element_bytes;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, extent, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product / element_bytes;
}

Json tensors_json(const Manifest& manifest) {
  Json tensors = Json::array();
  for (const ManifestTensor& tensor : manifest.tensors) {
    Json slices = Json::array();
    for (const ManifestSlice& slice : tensor.slices) {
      slices.push_back({{"file", slice.file}, {"begin", slice.begin}, {"end", slice.end}, {"blocks", slice.blocks}});
    }
    tensors.push_back({{"name", tensor.name},
                       {"dtype", safetensors_dtype(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"slices", std::move(slices)}});
  }
  return tensors;
}

Json files_json(const Manifest& manifest) {
  Json files = Json::object();
  for (const auto& [name, file] : manifest.files) {
    files[name] = {{"bytes", file.bytes}, {"header_xxh3_128", file.header_checksum}};
  }
  return files;
}

// A slice of version 1 is always a whole tensor.
ManifestSlice read_slice_of_version_1(const Json& json, const ManifestTensor& tensor) {
  if (json.at("shape").get<std::vector<int64_t>>() != tensor.shape ||
      json.at("offset").get<std::vector<int64_t>>() != std::vector<int64_t>(tensor.shape.size(), 0)) {
    throw JsonRefused("tensor \"" + tensor.name + "\" is in several parts, which version 1 does not allow");
  }
  return {json.at("file").get<std::string>(), 0, tensor.elements(), {json.at("xxh3_128").get<std::string>()}};
}

void read_tensors(const Json& json, Manifest& manifest) {
  for (const Json& entry : json.at("tensors")) {
    ManifestTensor tensor;
    tensor.name = entry.at("name").get<std::string>();
    const auto dtype = dtype_of_safetensors(entry.at("dtype").get<std::string>());
    if (!dtype) throw JsonRefused("tensor \"" + tensor.name + "\" has a dtype that is not known");
    tensor.dtype = *dtype;
    tensor.shape = entry.at("shape").get<std::vector<int64_t>>();
    if (!elements_of(tensor.shape, static_cast<int64_t>(c10::elementSize(*dtype)))) {
      throw JsonRefused("tensor \"" + tensor.name + "\" has a shape that no tensor has");
    }
    for (const Json& slice : entry.at("slices")) {
      if (manifest.version == 1) {
        tensor.slices.push_back(read_slice_of_version_1(slice, tensor));
        continue;
      }
      tensor.slices.push_back({slice.at("file").get<std::string>(), slice.at("begin").get<int64_t>(),
                               slice.at("end").get<int64_t>(), slice.at("blocks").get<std::vector<std::string>>()});
    }
    manifest.tensors.push_back(std::move(tensor));
  }
  for (const auto& [name, file] : json.at("files").items()) {
    if (name.find('/') != std::string::npos || name.empty() || name[0] == '.') {
      throw JsonRefused("it names the file \"" + name + "\"");
    }
    manifest.files[name] = {file.at("bytes").get<uint64_t>(), file.at("header_xxh3_128").get<std::string>()};
  }
}

// Checks that the parts of the manifest agree with one another.
void check_slices(Manifest& manifest) {
  for (ManifestTensor& tensor : manifest.tensors) {
    if (const auto wrong = wrong_ranges(tensor)) throw JsonRefused(*wrong);
    const int64_t block = manifest.block_elements(tensor);
    for (const ManifestSlice& slice : tensor.slices) {
      const auto blocks = static_cast<size_t>((slice.end - slice.begin - 1) / block + 1);
      // A slice without elements has no block, or in version 1 one block without bytes.
      if (slice.end > slice.begin ? slice.blocks.size() != blocks : slice.blocks.size() > 1) {
        throw JsonRefused("tensor \"" + tensor.name + "\" has " + std::to_string(slice.blocks.size()) +
                          " checksums of elements " + range_text(slice.begin, slice.end));
      }
      if (!manifest.files.contains(slice.file)) {
        throw JsonRefused("tensor \"" + tensor.name + "\" lies in \"" + slice.file +
                          "\", which is not one of its files");
      }
    }
  }
}

void sort_tensors(Manifest& manifest) { std::ranges::sort(manifest.tensors, {}, &ManifestTensor::name); }

[[noreturn]] void refuse_parts(const std::string& message) {
  throw Error(ErrorKind::kInternal, "checkpoint", "the slices that the ranks save do not fit together: " + message);
}

}  // namespace

bool is_optimizer(std::string_view tensor) { return tensor.starts_with("optimizer."); }

int64_t ManifestTensor::elements() const { return elements_of(shape, 1).value_or(0); }
int64_t ManifestTensor::bytes() const { return elements() * static_cast<int64_t>(c10::elementSize(dtype)); }

const ManifestTensor* Manifest::find(std::string_view tensor) const {
  const auto at = std::lower_bound(tensors.begin(), tensors.end(), tensor,
                                   [](const ManifestTensor& t, std::string_view name) { return t.name < name; });
  return at != tensors.end() && at->name == tensor ? &*at : nullptr;
}

int64_t Manifest::block_elements(const ManifestTensor& tensor) const {
  return block_bytes / static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

std::string stored_name(const ManifestTensor& tensor, const ManifestSlice& slice) {
  const bool whole = slice.begin == 0 && slice.end == tensor.elements();
  return whole ? tensor.name : tensor.name + range_text(slice.begin, slice.end);
}

std::vector<int64_t> stored_shape(const ManifestTensor& tensor, const ManifestSlice& slice) {
  const bool whole = slice.begin == 0 && slice.end == tensor.elements();
  return whole ? tensor.shape : std::vector<int64_t>{slice.end - slice.begin};
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const std::string text = read_small_file("checkpoint", path, kLargestManifest);
  Manifest manifest;
  try {
    // Nesting is bounded, so that a damaged file cannot take a disproportionate amount of memory.
    const Json json = parse_bounded_json(text, 9);
    if (json.at("format").get<std::string>() != kFormat) checkpoint_damaged(path, "is not an annulus checkpoint");
    manifest.version = json.at("version").get<int64_t>();
    if (manifest.version < 1 || manifest.version > kVersion) {
      checkpoint_damaged(path, "has version " + std::to_string(manifest.version) +
                                   ", but this program reads versions 1 to " + std::to_string(kVersion));
    }
    if (json.at("checksum").get<std::string>() != checksum_of(json)) {
      checkpoint_damaged(path, "its checksum does not match: it was damaged or changed");
    }
    manifest.step = json.at("step").get<int64_t>();
    manifest.extra = json.at("extra").get<std::map<std::string, std::string>>();
    if (manifest.version == 1) {
      manifest.block_bytes = std::numeric_limits<int64_t>::max();
    } else {
      manifest.world = json.at("world").get<int64_t>();
      manifest.block_bytes = json.at("block_bytes").get<int64_t>();
      manifest.model = json.at("model").get<std::map<std::string, std::string>>();
      if (manifest.block_bytes < 8 || manifest.block_bytes % 8 != 0) {
        throw JsonRefused("blocks of " + counted(manifest.block_bytes, "byte"));
      }
    }
    read_tensors(json, manifest);
    check_slices(manifest);
  } catch (const JsonRefused& what) {
    checkpoint_damaged(path, std::string("is malformed: ") + what.what());
  } catch (const Json::exception& what) {
    checkpoint_damaged(path, std::string("is malformed: ") + what.what());
  }
  sort_tensors(manifest);
  const auto twice = std::adjacent_find(manifest.tensors.begin(), manifest.tensors.end(),
                                        [](const auto& a, const auto& b) { return a.name == b.name; });
  if (twice != manifest.tensors.end()) {
    checkpoint_damaged(path, "is malformed: it has tensor \"" + twice->name + "\" twice");
  }
  return manifest;
}

std::string manifest_text(const Manifest& manifest) {
  try {
    Json json = {{"format", kFormat},
                 {"version", kVersion},
                 {"step", manifest.step},
                 {"world", manifest.world},
                 {"block_bytes", manifest.block_bytes},
                 {"model", manifest.model},
                 {"extra", manifest.extra},
                 {"tensors", tensors_json(manifest)},
                 {"files", files_json(manifest)}};
    json["checksum"] = checksum_of(json);
    return json.dump(1) + "\n";
  } catch (const Json::exception& what) {
    throw Error(ErrorKind::kInternal, "checkpoint",
                std::string("a string in the manifest is not UTF-8 text: ") + what.what());
  }
}

std::string manifest_part_text(const Manifest& manifest) {
  return Json{{"tensors", tensors_json(manifest)}, {"files", files_json(manifest)}}.dump();
}

void join_parts(const std::vector<std::string>& parts, Manifest& manifest) {
  std::map<std::string, ManifestTensor> tensors;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    Manifest part;
    read_tensors(Json::parse(parts[rank]), part);
    manifest.files.merge(part.files);
    for (ManifestTensor& tensor : part.tensors) {
      const auto [at, is_new] = tensors.try_emplace(tensor.name, tensor);
      if (is_new) continue;
      ManifestTensor& known = at->second;
      if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
        refuse_parts("rank " + std::to_string(rank) + " has tensor \"" + tensor.name +
                     "\" of another dtype or shape than lower ranks have it");
      }
      std::move(tensor.slices.begin(), tensor.slices.end(), std::back_inserter(known.slices));
    }
  }
  for (auto& [name, tensor] : tensors) {
    if (const auto wrong = wrong_ranges(tensor)) refuse_parts(*wrong);
    manifest.tensors.push_back(std::move(tensor));
  }
}

void checkpoint_damaged(const std::string& path, const std::string& message) {
  throw Error(ErrorKind::kInput, "checkpoint", path + ": " + message);
}

uint64_t readable_size(const std::string& path) {
  std::error_code error;
  const uintmax_t bytes = fs::file_size(path, error);
  if (!error) {
    // O_NONBLOCK, so that opening a named pipe does not wait for a writer.
    if (const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)); fd >= 0) return bytes;
    error = {errno, std::generic_category()};
  }
  throw Error(kind_of_errno(error.value()), "checkpoint", path + ": cannot be read: " + error.message());
}

}  // namespace annulus
