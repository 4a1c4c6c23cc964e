// See export.h.
#include "runtime/huggingface/export.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "common/error.h"
#include "common/text.h"
#include "runtime/config/config.h"
#include "runtime/data/shards/tokenization.h"
#include "runtime/huggingface/byte_tokenizer.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/huggingface/model_files.h"
#include "runtime/huggingface/text_ids.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_manifest.h"
#include "runtime/run/checkpoint_merge.h"
#include "runtime/run/run_folder.h"
#include "runtime/tensor_files/model_dtypes.h"

namespace annulus {
namespace {

// The configuration that a checkpoint's weights were trained with: the run's, but with [model] as the checkpoint
// recorded it, because config.toml may have changed since.
Config config_of(const std::string& run, const Manifest& manifest) {
  std::vector<std::string> sets;
  for (const auto& [key, value] : manifest.model) sets.push_back("model." + key + "=" + value);
  return load_config(run + "/config.toml", sets);
}

// The length of the longest rows up to this step.
int64_t longest_rows(const DataConfig& data, int64_t step) {
  int64_t longest = 0;
  for (const ContextSchedule::Stage& stage : data.context.stages) {
    if (stage.step == 0 || stage.step < step) longest = std::max(longest, stage.context);
  }
  return longest;
}

// The config.json of the model that the run began from; empty: it was trained from scratch.
std::string original_of(const std::string& run) {
  const std::string path = huggingface_folder(run) + "/config.json";
  std::error_code error;
  return std::filesystem::exists(path, error) || error ? read_small_file("huggingface", path) : "";
}

// `longest`: the length of the longest rows that the model was trained on.
ConfigToWrite config_to_write(const std::string& run, const ModelSection& model, int64_t longest) {
  ConfigToWrite to{.model = model, .context = longest, .original = original_of(run), .dtype = model.dtype};
  if (const auto made = Tokenizations().of_folder(tokenizer_folder(run))) {
    to.begin = made->begin;
    to.end = made->end;
  }
  if (!to.original.empty()) {
    to.context = std::max(longest, parse_folder_config(to.original, huggingface_folder(run)).context);
  }
  return to;
}

// Checks that the checkpoint's tensors are those of this model.
void check_tensors(const std::string& folder, const Manifest& manifest, const ModelShape& shape) {
  std::map<std::string, std::vector<int64_t>> expected;
  for (const DescribedUnit& group : described_units(shape)) {
    for (const ParameterShape& parameter : group.parameters) expected[parameter.name] = parameter.shape;
  }
  for (const ManifestTensor& tensor : manifest.tensors) {
    if (is_optimizer(tensor.name)) continue;
    const auto found = expected.find(tensor.name);
    if (found == expected.end() || found->second != tensor.shape) {
      checkpoint_damaged(folder, "tensor \"" + tensor.name + "\" " + list_text(tensor.shape) +
                                     " does not belong to the model of its run's configuration");
    }
    expected.erase(found);
  }
  if (!expected.empty()) checkpoint_damaged(folder, "it has no tensor \"" + expected.begin()->first + "\"");
}

// Whether the run has a tokenizer: that of the folder that it began from, or that of its shards.
bool has_tokenizer(const std::string& run) {
  for (const std::string& folder : {huggingface_folder(run), tokenizer_folder(run)}) {
    if (is_file(folder + "/tokenizer.json") || is_file(folder + "/tokenizer.model")) return true;
  }
  return false;
}

// Without this file, versions of transformers take the tokenizer for one of the class of the model's family. Returns
// whether a file was added.
bool describe_tokenizer(const std::string& folder, FileSystem& files) {
  std::error_code error;
  if (!std::filesystem::exists(folder + "/tokenizer.json", error)) return false;
  if (std::filesystem::exists(folder + "/tokenizer_config.json", error)) return false;
  write_atomically(files, folder + "/tokenizer_config.json",
                   "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}\n");
  return true;
}

ExportedModel export_checkpoint(const ExportOptions& options, const std::string& checkpoint, const Manifest& manifest,
                                FileSystem& files) {
  const Config config = config_of(options.run, manifest);
  const ModelSection& model = config.model;
  check_tensors(checkpoint, manifest, model);
  ExportedModel made;
  made.step = manifest.step;
  made.dtype = options.dtype.empty() ? model.dtype : options.dtype;
  ConfigToWrite to = config_to_write(options.run, model, longest_rows(config.data, manifest.step));
  to.dtype = made.dtype;
  to.leave_pattern = options.leave_pattern;
  made.context = to.context;
  const std::string text = write_model_config(to);
  const nlohmann::json written = nlohmann::json::parse(text);
  made.architecture = written.at("architectures").at(0);
  const auto token = manifest.extra.find("token");
  const bool on_bytes = token != manifest.extra.end() && token->second == "byte";
  bool own_tokenizer_config = false;  // not one that the run got with its tokenizer
  const auto add_files = [&](const std::string& folder, FileSystem& into) {
    write_atomically(into, folder + "/config.json", text);
    std::vector<std::string> added = {"config.json"};
    if (on_bytes && !has_tokenizer(options.run)) {
      const TextIds ids = to.original.empty() ? TextIds() : read_text_ids(huggingface_folder(options.run));
      const ByteTokenizer bytes = byte_tokenizer(ids, model.vocab);
      write_atomically(into, folder + "/tokenizer.json", bytes.tokenizer);
      write_atomically(into, folder + "/tokenizer_config.json", bytes.config);
      added.insert(added.end(), {"tokenizer.json", "tokenizer_config.json"});
      own_tokenizer_config = true;
    }
    for (const std::string& from : {huggingface_folder(options.run), tokenizer_folder(options.run)}) {
      for (const std::string& name : copy_files(passed_files(), from, folder, into)) added.push_back(name);
    }
    if (describe_tokenizer(folder, into)) {
      added.emplace_back("tokenizer_config.json");
      own_tokenizer_config = true;
    }
    for (const std::string& name : added) made.files.push_back(options.out + "/" + name);
  };
  const std::vector<std::string> weights = merge_checkpoint(checkpoint, manifest,
                                                            {.out = options.out,
                                                             .max_file_bytes = options.shard_bytes,
                                                             .dtype = model_dtype(made.dtype, "--dtype"),
                                                             .add_files = add_files},
                                                            files);
  made.files.insert(made.files.begin(), weights.begin(), weights.end());
  if (!model.rope_fp32) {
    made.notes.emplace_back(
        "the model was trained with rotary angles in fp64 (model.rope_fp32 = false); transformers rounds them to fp32, "
        "so that its angles differ by 4e-3 at position 131,072 and by 5e-2 at 1,048,576");
  }
  if (own_tokenizer_config && written.at("model_type") == "qwen2") {
    made.notes.emplace_back(
        "AutoTokenizer of transformers 5 reads the tokenizer of every qwen2 model as one of Qwen's, which normalizes "
        "text "
        "(NFC) and splits it in its own way; PreTrainedTokenizerFast.from_pretrained reads it as it is");
  }
  if (options.leave_pattern) {
    made.notes.emplace_back("config.json leaves out model.pattern = " + model.pattern.text());
  }
  return made;
}

}  // namespace

std::string exported_family(const std::string& run) {
  const Config config = load_config(run + "/config.toml");
  const std::string text = write_model_config(config_to_write(run, config.model, config.data.context.longest()));
  return parse_folder_config(text, run).family;
}

int64_t export_bytes() { return kBlockBytes + (1 << 20); }

ExportedModel export_model(const ExportOptions& options, const std::function<void(const std::string&)>& passed_over,
                           FileSystem& files) {
  // An error in these files must not be taken for a damaged checkpoint.
  const std::string original = original_of(options.run);
  if (!original.empty()) {
    parse_folder_config(original, huggingface_folder(options.run));
    if (!has_tokenizer(options.run)) read_text_ids(huggingface_folder(options.run));
  }
  load_config(options.run + "/config.toml");
  ExportedModel made;
  use_newest_whole(
      CheckpointStore(options.run, 1).newest_first(options.step),
      [&](const CheckpointStore::Entry& entry, const Manifest& manifest) {
        made = export_checkpoint(options, entry.path, manifest, files);
      },
      passed_over);
  return made;
}

}  // namespace annulus
