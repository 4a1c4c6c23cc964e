// See model_config.h. This file reads config.json; write_config.cc writes it.
#include "runtime/huggingface/model_config.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/files.h"
#include "common/names.h"
#include "common/text.h"
#include "runtime/huggingface/config_keys.h"
#include "runtime/huggingface/config_reader.h"
#include "runtime/huggingface/families.h"
#include "runtime/huggingface/rope_config.h"

namespace annulus {

using namespace huggingface;  // NOLINT(google-build-using-namespace): this file belongs to it

namespace {

using Json = nlohmann::json;

// kMostLayers and kWidest are also the bounds of the keys of [model].
constexpr int64_t kMostLayers = 100000, kWidest = 1 << 24, kLongest = int64_t{1} << 40;

const Family& family_of(const ConfigReader& config) {
  const std::string type = config.text("model_type", "");
  const Family* family = nullptr;
  std::vector<std::string> names;
  for (const Family& f : families()) {
    names.emplace_back(f.name);
    if (type == f.name) family = &f;
  }
  if (family == nullptr) {
    config.refuse("model_type", (type.empty() ? "is missing" : "is " + shown_name(type)) +
                                    ": the supported families are " + join(names, ", "));
  }
  const Json* architectures = config.find("architectures");
  if (architectures == nullptr) return *family;
  if (!architectures->is_array() || architectures->size() != 1 || (*architectures)[0] != family->architecture) {
    config.refuse("architectures", "must be [\"" + std::string(family->architecture) + "\"] where model_type is \"" +
                                       type + "\", but is " + shown(*architectures));
  }
  return *family;
}

// Checks that each key is in the table, and that those which only the table describes have allowed values.
void check_keys(const ConfigReader& config, const Json& object, const Family& family) {
  for (const auto& [name, value] : object.items()) {
    const ConfigKey* key =
        name.find('.') != std::string::npos && name != "transformers.js_config" ? nullptr : find_config_key(name);
    if (key == nullptr) {
      std::vector<std::string> names;
      for (const ConfigKey& known : config_keys()) names.emplace_back(known.name);
      config.refuse(name, "is not known, and might change what the model computes" + did_you_mean(name, names) +
                              "; if it does not, remove it from the file");
    }
    if (value.is_null()) continue;
    if (key->use == KeyUse::kRefused) {
      config.refuse(name, "is not supported: " + std::string(key->doc));
    }
    if (key->use == KeyUse::kChecked) {
      std::vector<std::string> may = split(key->values, ' ');
      bool is = false;
      for (const std::string& text : may) is = is || Json::parse(text) == value;
      if (!is) {
        config.refuse(name, "must be " + join(may, " or ") + ", but is " + shown(value) + ": " + std::string(key->doc));
      }
    }
    if (!is_of_family(*key, family.name) && value != false) {
      config.refuse(name, "is " + shown(value) + ", but this is no key of " + std::string(family.name));
    }
  }
}

// Whether each layer rotates queries and keys.
std::vector<bool> rotated(const ConfigReader& config, const Family& family, int64_t layers) {
  std::vector<bool> rotated(static_cast<size_t>(layers), true);
  if (family.rotaries != Rotaries::kOrNone) return rotated;
  const Json* given = config.find("no_rope_layers");
  if (given == nullptr) {
    const int64_t interval = config.whole("no_rope_layer_interval", 1, kMostLayers, 4);
    for (int64_t i = interval - 1; i < layers; i += interval) rotated[static_cast<size_t>(i)] = false;
    return rotated;
  }
  const bool fits = given->is_array() && static_cast<int64_t>(given->size()) >= layers &&
                    std::all_of(given->begin(), given->end(), [](const Json& of) { return of == 0 || of == 1; });
  if (!fits) {
    config.refuse("no_rope_layers", "must be a list of num_hidden_layers = " + std::to_string(layers) +
                                        " numbers, 1 or, for a layer without rotary positions, 0, but is " +
                                        shown(*given));
  }
  for (size_t i = 0; i < rotated.size(); ++i) rotated[i] = (*given)[i] == 1;
  return rotated;
}

// The windows of a family with layer_types where that key is missing.
std::vector<int64_t> default_windows(const ConfigReader& config, const Family& family, int64_t window,
                                     const std::vector<bool>& rotated) {
  std::vector<int64_t> windows(rotated.size(), 0);
  const auto layers = static_cast<int64_t>(windows.size());
  const int64_t first = family.rotaries == Rotaries::kAlike ? config.whole("max_window_layers", 0, kMostLayers, 28) : 0;
  const int64_t every =
      family.rotaries == Rotaries::kByWindow ? config.whole("sliding_window_pattern", 1, kMostLayers, 6) : layers + 1;
  for (int64_t i = first; i < layers; ++i) {
    const auto at = static_cast<size_t>(i);
    const bool slides = family.rotaries == Rotaries::kOrNone ? !rotated[at] : (i + 1) % every != 0;
    if (slides) windows[at] = window;
  }
  return windows;
}

// The window of each layer; 0: none.
std::vector<int64_t> windows(const ConfigReader& config, const Family& family, const std::vector<bool>& rotated) {
  const auto layers = static_cast<int64_t>(rotated.size());
  std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
  if (family.windows == Windows::kNone) return windows;
  // Null means no window; a missing key means the default.
  int64_t window = config.has("sliding_window") ? config.whole("sliding_window", 1, kLongest, 0) : family.window;
  if (family.windows == Windows::kAllLayers) {
    std::fill(windows.begin(), windows.end(), window);
    return windows;
  }
  if (family.window_switch && !config.flag("use_sliding_window", false)) window = 0;
  const Json* types = config.find("layer_types");
  if (types == nullptr) return default_windows(config, family, window, rotated);
  if (!types->is_array() || static_cast<int64_t>(types->size()) != layers) {
    config.refuse("layer_types", "must be a list of num_hidden_layers = " + std::to_string(layers) + " types, but is " +
                                     shown(*types));
  }
  for (size_t i = 0; i < types->size(); ++i) {
    const Json& type = (*types)[i];
    if (type == "full_attention" || type == "attention") continue;
    if (type != "sliding_attention") {
      config.refuse("layer_types", "has " + shown(type) + " for layer " + std::to_string(i) +
                                       ": only \"full_attention\" and \"sliding_attention\" are supported");
    }
    if (window == 0) {
      config.refuse("layer_types", "has \"sliding_attention\" for layer " + std::to_string(i) +
                                       ", but there is no sliding_window, or use_sliding_window is false");
    }
    windows[i] = window;
  }
  return windows;
}

// The rotary settings of the layers: `of_windows` for those with a window, and none for those that are not rotated.
LayerRotaries layer_rotaries(const std::vector<bool>& rotated, const std::vector<int64_t>& windows,
                             const LayerRotary& of_windows) {
  std::vector<LayerRotary> layers;
  for (size_t i = 0; i < rotated.size(); ++i) {
    layers.push_back(windows[i] > 0 ? of_windows : LayerRotary{});
    if (!rotated[i]) layers.back() = {.own = true, .scaling = {.kind = RotaryScaling::Kind::kNone}};
  }
  // The shortest list that repeats as the layers do.
  const auto repeats = [&](size_t length) {
    size_t i = length;
    while (i < layers.size() && layers[i] == layers[i - length]) ++i;
    return i == layers.size();
  };
  size_t length = 1;
  while (!repeats(length)) ++length;
  layers.resize(length);
  if (layers == std::vector<LayerRotary>(1)) layers.clear();
  return {layers};
}

LayerPatterns patterns(const std::vector<int64_t>& windows) {
  bool alike = true;
  std::vector<PatternSpec> each;
  for (const int64_t window : windows) {
    alike = alike && window == windows[0];
    each.push_back(window_pattern(window));
  }
  return alike ? LayerPatterns(each[0]) : LayerPatterns(each);
}

int64_t kv_heads(const ConfigReader& config, const Family& family, int64_t heads) {
  const bool missing = !config.has("num_key_value_heads");
  return config.whole("num_key_value_heads", 1, kWidest, missing && family.kv_heads > 0 ? family.kv_heads : heads);
}

int64_t head_dim(const ConfigReader& config, const Family& family, const ModelShape& shape) {
  if (config.find("head_dim") != nullptr) return config.whole("head_dim", 2, kWidest);
  if (family.head_dim > 0) return family.head_dim;
  if (shape.dim % shape.heads != 0) {
    config.refuse("hidden_size", "is " + std::to_string(shape.dim) +
                                     ", which is not a multiple of num_attention_heads = " +
                                     std::to_string(shape.heads) + ", and there is no head_dim");
  }
  return shape.dim / shape.heads;
}

}  // namespace

FolderConfig parse_folder_config(const std::string& text, const std::string& path) {
  const Json object = parse_object(text, path);
  const ConfigReader config(path, object);
  const Family& family = family_of(config);
  check_keys(config, object, family);

  FolderConfig folder;
  folder.family = family.name;
  folder.text = text;
  folder.path = path;
  ModelSection& m = folder.model;
  m.dim = config.whole("hidden_size", 2, kWidest);
  m.layers = config.whole("num_hidden_layers", 1, kMostLayers);
  m.heads = config.whole("num_attention_heads", 1, kWidest);
  m.ffn = config.whole("intermediate_size", 1, kWidest);
  m.vocab = config.whole("vocab_size", 2, kWidest);
  m.kv_heads = kv_heads(config, family, m.heads);
  m.head_size = head_dim(config, family, m);
  m.norm_eps = config.number("rms_norm_eps", 1e-300, 1, 1e-6);
  m.tie_embeddings = config.flag("tie_word_embeddings", family.tied);
  m.qk_norm = family.qk_norm;
  m.qkv_bias = family.qkv_bias;
  if (family.bias_key) m.qkv_bias = m.out_bias = config.flag("attention_bias", false);
  if (family.mlp_bias_key) m.mlp_bias = config.flag("mlp_bias", false);
  m.dropout = config.number("attention_dropout", 0, 1, 0);
  if (m.dropout == 1) config.refuse("attention_dropout", "must be less than 1");
  folder.context = config.whole("max_position_embeddings", 1, kLongest);
  m.rope_fp32 = true;
  if (family.gemma) {
    m.activation = Activation::kGeluTanh;
    m.norm_zero_centered = m.post_norms = m.scale_embeddings = true;
    m.query_pre_attn_scalar = static_cast<double>(config.whole("query_pre_attn_scalar", 1, kWidest, 256));
  }
  const LayerRotary of_windows = read_rope(config, family, folder.context, m);
  const std::vector<bool> rotated_layers = rotated(config, family, m.layers);
  const std::vector<int64_t> layer_windows = windows(config, family, rotated_layers);
  m.rope_layers = layer_rotaries(rotated_layers, layer_windows, of_windows);
  m.pattern = patterns(layer_windows);
  folder.dtype = config.text("dtype", config.text("torch_dtype", ""));
  m.dtype = folder.dtype == "bfloat16" ? "bf16" : "fp32";
  try {
    validate(m);
  } catch (const Error& error) {
    throw Error(ErrorKind::kInput, "huggingface", path + ": " + std::string(error.message()));
  }
  return folder;
}

FolderConfig read_folder_config(const std::string& folder) {
  std::error_code error;
  const std::string path = folder + "/config.json";
  if (!std::filesystem::exists(path, error) && !error) {
    throw Error(ErrorKind::kInput, "huggingface",
                std::filesystem::is_directory(folder, error)
                    ? folder + " holds no config.json: expected a folder in Hugging Face's layout"
                    : folder + ": there is no such folder: expected one in Hugging Face's layout");
  }
  return parse_folder_config(read_small_file("huggingface", path), path);
}

ModelSection read_model_config(const std::string& folder) { return read_folder_config(folder).model; }

ModelSection read_model_from(const Config& given) { return read_model_config(given.model.from); }

}  // namespace annulus
