// Config: the configuration of a training run, from a TOML file and `--set key=value` options. Used by every subcommand
// that reads a configuration or a run's folder; a run saves it, and the ranks compare it at bootstrap. One table
// (keys.cc) has the name, field, range and documentation of every key; reading (reading.cc), writing, comparing and
// documenting (writing.cc) iterate over it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"
#include "runtime/model/model_shape.h"

namespace annulus {

struct RunConfig {
  std::string name = "run";     // runs are FOLDER/NAME-001, -002, ...
  std::string folder = "runs";  // relative to the current directory
  int64_t seed = 1;
  int64_t steps = 0;  // required
  int64_t log_every = 10;
  int64_t log_bytes = 8 << 20;  // the limit of a rank's log file in the run's folder; 0: no file
  int64_t keep_logs = 100;      // folders in runs/logs that `launch` retains; 0: all
  double slow_share = 0.2;      // by how much a slow rank is above the median (runtime/run/stragglers.h); 0: none is
  int64_t slow_steps = 10;      // for so many steps
  double slow_seconds = 10;     // and seconds
  int64_t compare_copies = 0;   // after how many steps ranks compare what they hold alike (state/copies.h); 0: never
  bool tensorboard = false;     // whether rank 0 starts a process that writes event files for TensorBoard

  friend bool operator==(const RunConfig&, const RunConfig&) = default;
};

// One source of tokens (runtime/data/shards/corpus.h).
struct SourceConfig {
  std::string name = {};  // shown in metrics; empty: "train", or "source 1", "source 2", ... if there are several
  std::vector<std::string> files = {};  // required: files, globs, "python-sources" (runtime/data/shards/find_files.h)
  std::string format = "auto";          // "auto", "text", "annulus", "megatron", "llmc", "nanogpt"
  int64_t width = 0;   // bits per token, 16 or 32, if not in the format; 0: as in tokenization.json, or 16
  int64_t begin = -1;  // the id that begins every document, in formats without stored boundaries; -1: none
  int64_t end = -1;    // the id that ends every document, likewise
  double weight = 0;   // relative share of the rows; 0 for all sources: proportional to their sizes

  friend bool operator==(const SourceConfig&, const SourceConfig&) = default;
};

// The training data: one source, or a mixture of several. In TOML, a list of files is one source, and in a list of
// tables each table is one: [{ files = ["web/*.tokens"], weight = 0.7 }, { files = "code/*.tokens", weight = 0.3 }].
struct Sources {
  std::vector<SourceConfig> list;

  Sources() = default;
  Sources(std::vector<SourceConfig> sources) : list(std::move(sources)) {}  // NOLINT(google-explicit-constructor)
  Sources(std::vector<std::string> files);                                  // NOLINT(google-explicit-constructor)
  Sources(std::initializer_list<std::string> files) : Sources(std::vector<std::string>(files)) {}

  // Returns the name of source i in metrics and messages, with the defaults of SourceConfig::name.
  std::string name(size_t i) const;
  std::string text() const;  // as TOML

  friend bool operator==(const Sources&, const Sources&) = default;
};

// Returns the index of the last of these stages that has begun at `step`. They rise, and the first has begun.
template <typename Stage>
size_t stage_at(const std::vector<Stage>& stages, int64_t step) {
  size_t at = 0;
  while (at + 1 < stages.size() && stages[at + 1].step <= step) ++at;
  return at;
}

// The length of rows by step. In TOML, one number, or a list of [step, context] or [step, context, batch], each in
// effect from its step on.
struct ContextSchedule {
  struct Stage {
    int64_t step = 0;
    int64_t context = 2048;  // tokens in a row
    int64_t batch = 0;       // rows in a batch; 0: data.batch

    friend bool operator==(const Stage&, const Stage&) = default;
  };
  std::vector<Stage> stages = {Stage{}};  // not empty; steps are increasing, from 0

  ContextSchedule() = default;
  ContextSchedule(int64_t context) : stages{Stage{.context = context}} {}  // NOLINT(google-explicit-constructor)

  int64_t longest() const;
  std::string text() const;  // as TOML

  friend bool operator==(const ContextSchedule&, const ContextSchedule&) = default;
};

// Gradient accumulation: batches per step, by step. In TOML, one number, or a list of [step, batches], each in effect
// from its step on.
struct AccumulateSchedule {
  struct Stage {
    int64_t step = 0;
    int64_t batches = 1;

    friend bool operator==(const Stage&, const Stage&) = default;
  };
  std::vector<Stage> stages = {Stage{}};  // not empty; steps are increasing, from 0

  AccumulateSchedule() = default;
  AccumulateSchedule(int64_t batches) : stages{Stage{.batches = batches}} {}  // NOLINT(google-explicit-constructor)

  int64_t most() const;
  std::string text() const;  // as TOML

  friend bool operator==(const AccumulateSchedule&, const AccumulateSchedule&) = default;
};

struct DataConfig {
  // The composition of the steps from `step` on.
  struct Stage {
    int64_t step = 0;
    int64_t context = 0;     // tokens in a row
    int64_t batch = 0;       // rows of one forward and backward, over all ranks
    int64_t accumulate = 1;  // batches in a step

    int64_t rows() const { return batch * accumulate; }  // in a step
  };

  Sources train;          // required
  int64_t max_bytes = 0;  // of each source of text; 0: all
  double validation_fraction = 0.05;
  ContextSchedule context;
  int64_t batch = 4;                   // rows of one forward and backward, over all ranks
  AccumulateSchedule accumulate;       // batches in a step
  std::string packing = "stream";      // "stream", "best-fit", "document"
  bool documents = false;              // tokens attend only to their own document
  std::string long_documents = "cut";  // "cut", "refuse": those longer than a row
  std::string positions = "running";   // "running" through the row, "restart" at every document
  std::vector<int64_t> ignore;         // token ids ignored as targets
  std::string index;                   // folder of row indexes; empty: beside a source's first file

  // Returns the rows per batch during this stage of `context`.
  int64_t batch_of(const ContextSchedule::Stage& stage) const { return stage.batch > 0 ? stage.batch : batch; }
  // Returns a stage for each step at which `context` or `accumulate` changes; steps are increasing, from 0.
  std::vector<Stage> stages() const;

  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

// The attention patterns of a model's layers: one for all, or a list that repeats: layer i has entry i modulo its
// length.
struct LayerPatterns {
  PatternSpec all = causal_pattern();
  std::vector<PatternSpec> each;  // empty: every layer has `all`

  LayerPatterns() = default;
  LayerPatterns(PatternSpec one) : all(std::move(one)) {}                  // NOLINT(google-explicit-constructor)
  LayerPatterns(std::vector<PatternSpec> list) : each(std::move(list)) {}  // NOLINT(google-explicit-constructor)

  const PatternSpec& of(int64_t layer) const {
    return each.empty() ? all : each[static_cast<size_t>(layer) % each.size()];
  }
  std::string text() const;  // a TOML table, or a list of them

  friend bool operator==(const LayerPatterns&, const LayerPatterns&) = default;
};

// The model's shape, and settings of its training. load_config sets kv_heads and ffn if they are 0, and resolves the
// device "auto" to "cpu" for the dtype "fp64".
struct ModelSection : ModelShape {
  ModelSection() : ModelShape{.vocab = 256} {}

  std::string from;            // a folder in Hugging Face's layout with the initial weights; empty: random, by run.seed
  std::string dtype = "fp32";  // "fp32", "bf16", "fp64"
  LayerPatterns pattern;
  double dropout = 0;  // attention dropout rate in training
  bool recompute = false;

  friend bool operator==(const ModelSection&, const ModelSection&) = default;
};

// Parameters with their own learning rate or weight decay.
struct ParameterGroup {
  std::string match;                   // parameter names (runtime/model/parameters.h), with `*` and `?`
  double lr = 1;                       // multiplies the schedule's learning rate
  std::optional<double> weight_decay;  // of all that match, vectors included; nullopt: unchanged

  friend bool operator==(const ParameterGroup&, const ParameterGroup&) = default;
};

// In TOML, a list of tables: [{ match = "*norm.weight", lr = 0.5 }]. The first matching group of a parameter applies.
struct ParameterGroups {
  std::vector<ParameterGroup> list;

  std::string text() const;  // as TOML

  friend bool operator==(const ParameterGroups&, const ParameterGroups&) = default;
};

struct OptimizerSection {
  double lr = 0;                    // required
  std::string schedule = "cosine";  // "cosine", "linear", "constant", "wsd"
  double min_lr_ratio = 0.1;
  int64_t warmup = 0;  // steps
  int64_t decay = 0;   // steps of the last phase of "wsd"
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  ParameterGroups groups;
  double clip = 1.0;  // maximum gradient norm; 0: no limit
  int64_t skips = 10;
  double spike = 0;                    // multiple of the running median of the gradient norm; 0: no spike detection
  int64_t spike_window = 100;          // norms in the median
  std::string spike_action = "skip";   // "skip", "rewind"
  int64_t shard = 0;                   // 0 to 3, as ZeRO stages: what is sharded over ranks
  std::string shard_within = "world";  // "world", "host": the ranks over which it is sharded
  std::string offload = "none";        // "none", "host", "file": where moments and master weights lie

  friend bool operator==(const OptimizerSection&, const OptimizerSection&) = default;
};

struct MeshSection {
  int64_t data = 1;
  int64_t context = 0;  // 0: all ranks divided by `data`

  friend bool operator==(const MeshSection&, const MeshSection&) = default;
};

// The first three are for launcher/network/network.h; names are separated by commas.
struct NetworkSection {
  std::string interfaces;
  std::string hcas;
  std::string rank_hca = "auto";  // "auto", "nearest"
  int64_t exchange_ctas = 0;      // 0: NCCL chooses

  friend bool operator==(const NetworkSection&, const NetworkSection&) = default;
};

struct AttentionSection {
  std::string layout = "zigzag";
  std::string schedule = "auto";
  int64_t within = 0;   // ranks of an inner group; 0: as the schedule does by itself (attention/plan/schedules.h)
  std::string machine;  // find_machine in attention/plan/machine.h; empty: ANNULUS_MACHINE, or else that of the device
  std::string kernel = "auto";
  bool even = true;

  friend bool operator==(const AttentionSection&, const AttentionSection&) = default;
};

struct ValidationSection {
  int64_t every = 100;  // steps; 0: never
  int64_t batches = 4;
  std::vector<std::string> tasks = {};  // runtime/tasks/task.h
  int64_t trials = 16;                  // of each task

  friend bool operator==(const ValidationSection&, const ValidationSection&) = default;
};

struct CheckpointSection {
  int64_t every = 200;  // steps; 0: only at the end
  int64_t keep = 3;
  bool background = true;         // written behind training, from a copy, if there is memory for it
  std::string on_error = "stop";  // "stop", "continue"

  friend bool operator==(const CheckpointSection&, const CheckpointSection&) = default;
};

struct MemorySection {
  int64_t caches = 1792;         // MiB (memory/caches.h)
  int64_t pool = 1024;           // MiB (memory/pool/pool.h)
  int64_t masks = 1024;          // MiB (mask_limit in attention/pattern/token_mask.h)
  std::string offload = "none";  // "none", "host", "file": where what the forward keeps waits for the backward
  std::string host;   // bytes of pinned memory that the ranks of a host may take together for offload; empty: any
  std::string files;  // folder of files of offload; empty: run.folder
  int64_t device_layers = 2;  // the last layers, which keep theirs on the device

  friend bool operator==(const MemorySection&, const MemorySection&) = default;
};

struct Config {
  std::string device = "auto";  // "auto", "cpu", "cuda"
  double timeout = 300;         // deadline of each communication, in seconds
  bool tf32 = false;
  bool deterministic = false;
  std::string cuda_graphs = "auto";  // "auto", "off"
  RunConfig run;
  DataConfig data;
  ModelSection model;
  OptimizerSection optimizer;
  MeshSection mesh;
  NetworkSection network;
  AttentionSection attention;
  ValidationSection validation;
  CheckpointSection checkpoint;
  MemorySection memory;

  friend bool operator==(const Config&, const Config&) = default;
};

// Returns the model of the folder given.model.from, from its config.json (runtime/huggingface/model_config.h). `given`
// has only the keys that the user set, and may be incomplete.
using ModelReader = std::function<ModelSection(const Config& given)>;

// Reads the file, then applies `sets`, each "section.key=value"; the value is TOML, or a string if it is not valid
// TOML. Raises Error(kInput) if the file is missing or is not TOML, and Error(kUsage) for an unknown key (suggesting
// the nearest), a wrong type, a value out of range, or contradictory values. Messages name file, line and key.
//
// If model.from is set, `read_model` supplies [model], and the user's keys override its values. Keys of the model's
// shape must then equal the folder's, except those of the rotary embedding. Without `read_model` the folder
// is not read, because a run's own configuration has every key.
Config load_config(const std::string& path, const std::vector<std::string>& sets = {},
                   const ModelReader& read_model = {});

// Parses a text as load_config does; `source` names it in messages.
Config parse_config(std::string_view toml, std::string_view source, const std::vector<std::string>& sets = {},
                    const ModelReader& read_model = {});

// Parses a source as data.train has it: a path or a glob, a TOML list of them, or a table with "files". Without a name,
// the source is called by its files. `where` begins messages, such as "--data". Raises Error(kUsage) for invalid
// values.
SourceConfig parse_source(std::string_view text, std::string_view where);

// Returns the whole configuration as TOML; parse_config() of it gives an equal Config.
std::string to_toml(const Config& config);

// A key, "section.key", and its value as TOML.
struct KeyText {
  std::string key, value;

  friend bool operator==(const KeyText&, const KeyText&) = default;
};

// Returns every key, in the table's order. Ranks compare this at bootstrap.
std::vector<KeyText> flatten(const Config& config);

// A key whose values, as TOML, differ between two configurations.
struct ChangedKey {
  std::string key, was, is;
  // Weights trained with one value are meaningless with the other. Not model.pattern: training may continue with a
  // wider pattern.
  bool of_model = false;
};
std::vector<ChangedKey> changed_keys(const Config& before, const Config& now);

// Returns a Markdown table of every key (default, range, meaning) for docs/reference/configuration.md.
std::string config_reference();

// Returns a configuration of a small model that has every key, with its default or, if it is required, an example, and
// says in comments what each is: what `train --help-config` prints. load_config reads it as it is.
std::string config_template();

}  // namespace annulus
