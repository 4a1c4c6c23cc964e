// See inspection.h.
#include "runtime/inference/inspection.h"

#include <algorithm>
#include <set>
#include <string>

#include "common/error.h"
#include "runtime/huggingface/export.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/huggingface/weights.h"
#include "runtime/inference/opened_model.h"
#include "runtime/model/model_shape.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_manifest.h"
#include "runtime/tensor_files/safetensors.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/state/sharding.h"

namespace annulus {
namespace {

std::vector<Inspection::Pattern> patterns_of(const ModelSection& model) {
  std::vector<Inspection::Pattern> patterns;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string text = model.pattern.of(layer).text();
    const auto found = std::find_if(patterns.begin(), patterns.end(), [&](const auto& p) { return p.text == text; });
    if (found == patterns.end()) {
      patterns.push_back({text, {layer}});
    } else {
      found->layers.push_back(layer);
    }
  }
  return patterns;
}

// The configuration of a job with one rank that trains on one row of this length at a time.
Config alone(const Inspection& of, const std::optional<Config>& run) {
  Config config = run.value_or(Config());
  config.model = of.model;
  config.data.context = of.length;
  config.data.batch = 1;
  config.data.accumulate = 1;
  config.data.documents = false;  // the lengths of documents are not known
  config.mesh = {};
  config.optimizer.shard = 0;
  config.attention.layout = "contiguous";
  config.attention.within = 0;
  config.attention.even = false;
  return config;
}

void look_at_run(const OpenedModel& opened, Inspection& to) {
  try {
    to.family = exported_family(opened.path());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUsage) throw;
    to.no_family = error.message();
  }
  const CheckpointStore store(opened.path(), 1);
  for (const CheckpointStore::Entry& entry : store.newest_first()) {
    Manifest manifest;
    try {
      manifest = read_manifest(entry.path);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInput) throw;
      continue;  // damaged, or removed by the run meanwhile
    }
    to.step = entry.step;
    std::set<std::string> dtypes;
    for (const ManifestTensor& tensor : manifest.tensors) {
      if (is_optimizer(tensor.name)) continue;
      to.weight_bytes += tensor.bytes();
      dtypes.emplace(safetensors_dtype(tensor.dtype));
    }
    to.dtypes.assign(dtypes.begin(), dtypes.end());
    return;
  }
}

}  // namespace

Inspection inspect_model(const std::string& which, const std::string& root, std::optional<int64_t> length) {
  const OpenedModel opened(which, root, std::nullopt);
  Inspection to;
  to.path = opened.path();
  to.is_run = opened.run().has_value();
  to.model = opened.model();
  to.context = opened.context();
  to.parameters = parameter_count(to.model);
  to.patterns = patterns_of(to.model);
  if (to.is_run) {
    look_at_run(opened, to);
  } else {
    to.family = read_folder_config(to.path).family;
    const ModelWeights weights(to.path, to.model);
    to.dtypes = weights.dtypes();
    to.weight_bytes = weights.bytes();
  }
  to.length = length.value_or(to.context);
  const Config config = alone(to, opened.run());
  const std::vector<Stage> stages = training_stages(config, 1);
  const double pairs = stages[0].layers.pairs_per_token();
  to.flops = flops_per_token(to.model, pairs);
  to.attention_flops = to.flops - flops_per_token(to.model, 0);
  to.training = plan_memory(config, stages, make_sharding(config, 1, 1), 1, 0, RanksAre::kProcesses).kinds();
  to.import_bytes = parameter_count(to.model) * 4 + kBlockBytes;
  to.export_bytes = export_bytes();
  return to;
}

}  // namespace annulus
