// See weights.h.
#include "runtime/huggingface/weights.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/checked_json.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/files.h"
#include "common/names.h"
#include "common/text.h"
#include "runtime/run/checkpoint_manifest.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEmbedding = "model.embed_tokens.weight", kOutput = "lm_head.weight";
constexpr size_t kLargestIndex = 100'000'000;  // as of a safetensors header, which holds as many names

[[noreturn]] void refuse(const std::string& path, const std::string& message) {
  throw Error(ErrorKind::kInput, "huggingface", path + ": " + message);
}

[[noreturn]] void refuse_tensor(const std::string& path, const std::string& name, const std::string& message) {
  refuse(path, "tensor " + shown_name(name) + " " + message);
}

bool contains_any(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::ranges::any_of(words, [&](std::string_view word) { return text.find(word) != std::string_view::npos; });
}

// Older versions of transformers saved it; it is not read, because it follows from the configuration.
bool is_derived(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

[[noreturn]] void no_weights(const std::string& folder) {
  std::error_code error;
  bool pickled = false;
  std::string other;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    pickled = pickled || name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth") ||
              name.ends_with(".bin.index.json");
    if (name.ends_with(".safetensors")) other = name;
  }
  const std::string expected = "holds neither model.safetensors nor model.safetensors.index.json";
  if (error) refuse(folder, "cannot be read: " + error.message());
  if (!other.empty()) {
    refuse(folder,
           expected + "; it holds " + shown_name(other) +
               ", which may have other names for its tensors: save the model with transformers' save_pretrained");
  }
  if (!pickled) refuse(folder, expected);
  refuse(folder, expected +
                     ", but pickled weights, which are not read because they can run any program: if you trust them, "
                     "transformers converts them with "
                     "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)");
}

nlohmann::json read_index(const std::string& path) {
  try {
    nlohmann::json index = parse_bounded_json(read_small_file("huggingface", path, kLargestIndex), 8);
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object() ||
        index["weight_map"].empty()) {
      refuse(path, "expected an object with \"weight_map\", the file of each tensor");
    }
    return index;
  } catch (const JsonRefused& refused) {
    refuse(path, std::string("expected JSON: ") + refused.what());
  }
}

// Whether this names a file beside the index, and no path elsewhere.
bool is_shard_name(const std::string& name) {
  return name.ends_with(".safetensors") && name.find('/') == std::string::npos && !name.starts_with(".");
}

}  // namespace

ModelWeights::ModelWeights(const std::string& folder, const ModelShape& shape) : folder_(folder) {
  std::error_code error;
  const std::string single = folder + "/model.safetensors", index = folder + "/model.safetensors.index.json";
  // transformers looks in the same order.
  if (fs::exists(single, error)) {
    open_single(single);
  } else if (fs::exists(index, error)) {
    open_set(folder, index, shape.tie_embeddings);
  } else {
    no_weights(folder);
  }
  std::erase_if(tensors_, [](const auto& entry) { return is_derived(entry.first); });
  check_tie(shape);

  std::map<std::string, ParameterShape> expected;
  for (DescribedUnit& group : described_units(shape)) {
    for (ParameterShape& parameter : group.parameters) expected.emplace(parameter.name, std::move(parameter));
  }
  check_known(expected);
  for (const auto& [name, parameter] : expected) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) {
      refuse(folder, "tensor " + shown_name(name) + ", which the model of config.json has, is in none of the " +
                         counted(static_cast<int64_t>(files_.size()), "file") + " of weights");
    }
    const auto& [path, file, info] = found->second;
    if (info->shape != parameter.shape) {
      const bool transposed =
          std::equal(info->shape.begin(), info->shape.end(), parameter.shape.rbegin(), parameter.shape.rend());
      refuse_tensor(path, name,
                    (transposed ? "is transposed: it is " : "is ") + list_text(info->shape) +
                        ", but config.json makes it " + list_text(parameter.shape));
    }
    if (!c10::isFloatingType(info->dtype)) {
      refuse_tensor(path, name,
                    "is " + std::string(safetensors_dtype(info->dtype)) +
                        ", as quantised weights are: only F64, F32, F16 and BF16 are read");
    }
  }
}

void ModelWeights::add(const std::string& path, const SafetensorsFile& file) {
  for (const TensorInfo& info : file.tensors()) tensors_.emplace(info.name, Place{path, &file, &info});
}

void ModelWeights::open_single(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  add(path, *files_.back());
}

void ModelWeights::open_set(const std::string& folder, const std::string& index_path, bool tied) {
  const nlohmann::json index = read_index(index_path);
  const nlohmann::json& map = index["weight_map"];
  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& [tensor, shard] : map.items()) {
    if (!shard.is_string() || !is_shard_name(shard.get_ref<const std::string&>())) {
      refuse_tensor(index_path, tensor,
                    "must be in a file beside the index, NAME.safetensors, but is in " + shown_name(shard.dump()));
    }
    const std::string name = shard, path = folder + "/" + name;
    if (shards.contains(name)) continue;
    std::error_code error;
    if (!fs::exists(path, error) && !error) {
      refuse(path, "is missing, though " + index_path + " says that it holds tensor " + shown_name(tensor));
    }
    files_.push_back(std::make_unique<SafetensorsFile>(path));
    shards[name] = files_.back().get();
  }
  for (const auto& [name, file] : shards) {
    const std::string path = folder + "/" + name;
    for (const TensorInfo& info : file->tensors()) {
      const auto said = map.find(info.name);
      if (said == map.end()) refuse_tensor(path, info.name, "is not in " + index_path);
      if (*said != name)
        refuse_tensor(path, info.name, "is here, but according to " + index_path + " it is in " + said->dump());
    }
    add(path, *file);
  }
  for (const auto& [tensor, shard] : map.items()) {
    if (tensors_.contains(tensor)) continue;
    // Converters leave the lines of tensors that they dropped because they share memory with others.
    if (tied && tensor == kOutput) continue;
    refuse_tensor(folder + "/" + shard.get<std::string>(), tensor,
                  "is not in the file, but according to " + index_path + " it is");
  }
}

void ModelWeights::check_known(const std::map<std::string, ParameterShape>& expected) const {
  for (const auto& [name, place] : tensors_) {
    if (expected.contains(name)) continue;
    if (contains_any(name, {"qkv_proj", "gate_up_proj", "query_key_value", "Wqkv", "W_pack", "c_attn"})) {
      refuse_tensor(place.path, name,
                    "holds several projections, which must be separate: q_proj, k_proj, v_proj, gate_proj, up_proj");
    }
    if (contains_any(name, {".qweight", ".qzeros", ".scales", "_scale", ".g_idx", ".absmax", ".quant_"})) {
      refuse_tensor(place.path, name, "belongs to quantised weights, which are not read");
    }
    if (expected.contains("model." + name)) {
      refuse_tensor(place.path, name, "lacks \"model.\" before its name: the file holds a model without its output");
    }
    std::vector<std::string> names;
    for (const auto& [known, parameter] : expected) names.push_back(known);
    refuse_tensor(place.path, name,
                  "is " + list_text(place.info->shape) + ", but the model of config.json has no tensor of this name" +
                      (names.size() < 1000 ? did_you_mean(name, names) : ""));
  }
}

// As in transformers, one of the two matrices stands for both if the other is missing, and both may be there if they
// are equal. If they differ, transformers continues with two matrices whatever the configuration says; here they are
// refused.
void ModelWeights::check_tie(const ModelShape& shape) {
  const auto output = tensors_.find(std::string(kOutput));
  if (!shape.tie_embeddings || output == tensors_.end()) return;
  const auto embedding = tensors_.find(std::string(kEmbedding));
  if (embedding == tensors_.end()) {
    tensors_.emplace(kEmbedding, output->second);
  } else {
    require_equal(embedding->second, output->second);
  }
  tensors_.erase(std::string(kOutput));
}

void ModelWeights::require_equal(const Place& a, const Place& b) const {
  bool same = a.info->shape == b.info->shape && a.info->dtype == b.info->dtype;
  std::vector<char> x(1 << 20), y(1 << 20);
  for (uint64_t at = 0; same && at < a.info->bytes; at += x.size()) {
    const uint64_t n = std::min<uint64_t>(x.size(), a.info->bytes - at);
    a.file->read(*a.info, at, n, x.data());
    b.file->read(*b.info, at, n, y.data());
    same = std::memcmp(x.data(), y.data(), n) == 0;
  }
  if (same) return;
  refuse_tensor(b.path, std::string(kOutput),
                "differs from " + std::string(kEmbedding) + " of " + a.path +
                    ", but config.json ties the two: set tie_word_embeddings to false if they are two matrices, or "
                    "remove the tensor");
}

void ModelWeights::read(const std::vector<TensorSlice>& into) const {
  std::vector<char> buffer;
  for (const TensorSlice& slice : into) {
    const auto found = tensors_.find(slice.name);
    const PlacedVector elements = slice.elements();
    const int64_t length = elements.numel();
    if (found == tensors_.end() || found->second.info->shape != slice.shape) {
      throw Error(ErrorKind::kInternal, "huggingface", folder_ + " was opened for a model without " + slice.name);
    }
    const auto& [path, file, info] = found->second;
    const auto size = static_cast<int64_t>(c10::elementSize(info->dtype));
    const int64_t most = kBlockBytes / size;
    for (int64_t at = 0; at < length; at += most) {
      const int64_t n = std::min(most, length - at);
      buffer.resize(std::max(buffer.size(), static_cast<size_t>(n * size)));
      file->read(*info, static_cast<uint64_t>((slice.begin + at) * size), static_cast<uint64_t>(n * size),
                 buffer.data());
      elements.write(at, at::from_blob(buffer.data(), {n}, at::TensorOptions().dtype(info->dtype)));
    }
  }
}

std::string ModelWeights::fingerprint() const {
  Checksum sum;
  std::array<char, 4096> end{};
  for (const auto& [name, place] : tensors_) {
    const TensorInfo& info = *place.info;
    const std::string what =
        name + " " + std::string(safetensors_dtype(info.dtype)) + " " + list_text(info.shape) + "\n";
    sum.update(what.data(), what.size());
    const uint64_t n = std::min<uint64_t>(end.size(), info.bytes);
    for (const uint64_t at : {uint64_t{0}, info.bytes - n}) {
      place.file->read(info, at, n, end.data());
      sum.update(end.data(), n);
    }
  }
  return sum.hex();
}

int64_t ModelWeights::bytes() const {
  uint64_t bytes = 0;
  for (const auto& [name, place] : tensors_) bytes += place.info->bytes;
  return static_cast<int64_t>(bytes);
}

std::vector<std::string> ModelWeights::dtypes() const {
  std::set<std::string> names;
  for (const auto& [name, place] : tensors_) names.emplace(safetensors_dtype(place.info->dtype));
  return {names.begin(), names.end()};
}

}  // namespace annulus
