// Configuration of a training run: what a TOML file and `--set key=value` say. Read by train and sample, saved with
// every run, compared between ranks at bootstrap. One table in keys.cc holds every key: its name, place, range and
// line of documentation; reading (reading.cc), writing, comparing and documenting (writing.cc) all go through it.
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
#include "model/description/model_shape.h"

namespace annulus {

struct RunConfig {
  std::string name = "run";     // runs are FOLDER/NAME-001, -002, ...
  std::string folder = "runs";  // relative to the current directory
  int64_t seed = 1;
  int64_t steps = 0;  // required
  int64_t log_every = 10;

  friend bool operator==(const RunConfig&, const RunConfig&) = default;
};

// One source of tokens: what data/shards/corpus.h opens.
struct SourceConfig {
  std::string name = {};                // of its metrics; empty: "train", or of several the number, from 1
  std::vector<std::string> files = {};  // required: files, globs, "python-sources" (data/shards/find_files.h)
  std::string format = "auto";          // "auto", "text", "annulus", "megatron", "llmc", "nanogpt"
  int64_t width = 0;                    // bits of a token where the format has no mark: 16, 32; 0: 16
  int64_t begin = -1;  // the id with which every document begins, in formats without boundaries; -1: there is none
  int64_t end = -1;    // the id with which every document ends, likewise
  double weight = 0;   // share of rows, relative to the other sources'; 0: all in proportion to their sizes

  friend bool operator==(const SourceConfig&, const SourceConfig&) = default;
};

// What a run trains on: one source, or several that are mixed. In TOML a list of files is one source; a list of tables
// is one source a table: [{ files = ["web/*.tokens"], weight = 0.7 }, { files = "code/*.tokens", weight = 0.3 }].
struct Sources {
  std::vector<SourceConfig> list;

  Sources() = default;
  Sources(std::vector<SourceConfig> sources) : list(std::move(sources)) {}  // NOLINT(google-explicit-constructor)
  Sources(std::vector<std::string> files);                                  // NOLINT(google-explicit-constructor)
  Sources(std::initializer_list<std::string> files) : Sources(std::vector<std::string>(files)) {}

  // Of source i in metrics and messages: its own, or "train", or of several "source 1".
  std::string name(size_t i) const;
  std::string text() const;  // as TOML

  friend bool operator==(const Sources&, const Sources&) = default;
};

// The lengths of the rows that a run trains on, by step. In TOML one number, or a list of [step, context] and [step,
// context, batch]: from that step on.
struct ContextSchedule {
  struct Stage {
    int64_t step = 0;
    int64_t context = 2048;  // tokens in a row
    int64_t batch = 0;       // rows in a batch; 0: data.batch

    friend bool operator==(const Stage&, const Stage&) = default;
  };
  std::vector<Stage> stages = {Stage{}};  // at least one, the first of step 0, steps rising

  ContextSchedule() = default;
  ContextSchedule(int64_t context) : stages{Stage{.context = context}} {}  // NOLINT(google-explicit-constructor)

  int64_t longest() const;
  // The last of them that has begun at `step`, from 0.
  size_t stage_of(int64_t step) const;
  std::string text() const;  // as TOML

  friend bool operator==(const ContextSchedule&, const ContextSchedule&) = default;
};

// How many batches a step has, by step. In TOML one number, or a list of [step, batches]: from that step on.
struct AccumulateSchedule {
  struct Stage {
    int64_t step = 0;
    int64_t batches = 1;

    friend bool operator==(const Stage&, const Stage&) = default;
  };
  std::vector<Stage> stages = {Stage{}};  // at least one, the first of step 0, steps rising

  AccumulateSchedule() = default;
  AccumulateSchedule(int64_t batches) : stages{Stage{.batches = batches}} {}  // NOLINT(google-explicit-constructor)

  int64_t most() const;
  int64_t at(int64_t step) const;  // from 0
  std::string text() const;        // as TOML

  friend bool operator==(const AccumulateSchedule&, const AccumulateSchedule&) = default;
};

struct DataConfig {
  // What steps are made of from `step` on.
  struct Stage {
    int64_t step = 0;
    int64_t context = 0;     // tokens in a row
    int64_t batch = 0;       // rows of one forward and backward, over all ranks
    int64_t accumulate = 1;  // batches of a step

    int64_t rows() const { return batch * accumulate; }  // of a step
  };

  Sources train;          // required
  int64_t max_bytes = 0;  // of each source of text; 0: all
  double validation_fraction = 0.05;
  ContextSchedule context;
  int64_t batch = 4;                   // rows of one forward and backward, over all ranks
  AccumulateSchedule accumulate;       // of which a step has as many
  std::string packing = "stream";      // "stream", "best-fit", "document"
  bool documents = false;              // a token sees its own document only
  std::string long_documents = "cut";  // "cut", "refuse": those longer than a row
  std::string positions = "running";   // "running", "restart": with every document
  std::vector<int64_t> ignore;         // ids that are no targets
  std::string index;                   // folder of row indexes; empty: beside a source's first file

  // Rows of a batch from `stage` of context on.
  int64_t batch_of(const ContextSchedule::Stage& stage) const { return stage.batch > 0 ? stage.batch : batch; }
  // One for each step from which on `context` or `accumulate` says something else; the first of step 0, steps rising.
  std::vector<Stage> stages() const;

  friend bool operator==(const DataConfig&, const DataConfig&) = default;
};

// The attention patterns of a model's layers: one for all of them, or one for each.
struct LayerPatterns {
  PatternSpec all = causal_pattern();
  std::vector<PatternSpec> each;  // empty: `all`

  LayerPatterns() = default;
  LayerPatterns(PatternSpec one) : all(std::move(one)) {}                  // NOLINT(google-explicit-constructor)
  LayerPatterns(std::vector<PatternSpec> list) : each(std::move(list)) {}  // NOLINT(google-explicit-constructor)

  const PatternSpec& of(int64_t layer) const { return each.empty() ? all : each[static_cast<size_t>(layer)]; }
  std::string text() const;  // a TOML table, or a list of them

  friend bool operator==(const LayerPatterns&, const LayerPatterns&) = default;
};

// The model's shape, and how it is trained. load_config fills in kv_heads and ffn where they are 0.
struct ModelSection : ModelShape {
  ModelSection() : ModelShape{.vocab = 256} {}

  std::string from;            // a folder in Hugging Face's layout that the weights begin as; empty: by run.seed
  std::string dtype = "fp32";  // "fp32", "bf16"
  LayerPatterns pattern;
  double dropout = 0;  // of attention probabilities, in training
  bool recompute = false;

  friend bool operator==(const ModelSection&, const ModelSection&) = default;
};

// Parameters that are updated otherwise than the rest.
struct ParameterGroup {
  std::string match;                   // names (model/parameters.h), with `*` and `?`
  double lr = 1;                       // times that of the schedule
  std::optional<double> weight_decay;  // of all that match; empty: as without the group

  friend bool operator==(const ParameterGroup&, const ParameterGroup&) = default;
};

// In TOML a list of tables: [{ match = "*norm.weight", lr = 0.5 }]. The first that matches a parameter counts.
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
  double clip = 1.0;  // 0: none
  int64_t skips = 10;
  double spike = 0;                    // times the running median of the gradient norm; 0: no rule
  int64_t spike_window = 100;          // norms
  std::string spike_action = "skip";   // "skip", "rewind"
  int64_t shard = 0;                   // 0 to 3: what the ranks hold a part of only
  std::string shard_within = "world";  // "world", "host": which ranks hold the parts

  friend bool operator==(const OptimizerSection&, const OptimizerSection&) = default;
};

struct MeshSection {
  int64_t data = 1;
  int64_t context = 0;  // 0: all ranks that the other axes leave

  friend bool operator==(const MeshSection&, const MeshSection&) = default;
};

// Names, lists of them with commas; launcher/network/network.h says what becomes of them.
struct NetworkSection {
  std::string interfaces;
  std::string hcas;
  std::string rank_hca = "auto";  // "auto", "nearest"

  friend bool operator==(const NetworkSection&, const NetworkSection&) = default;
};

struct AttentionSection {
  std::string layout = "zigzag";
  std::string schedule = "auto";
  std::string kernel = "auto";
  bool even = true;

  friend bool operator==(const AttentionSection&, const AttentionSection&) = default;
};

struct ValidationSection {
  int64_t every = 100;  // steps; 0: never
  int64_t batches = 4;

  friend bool operator==(const ValidationSection&, const ValidationSection&) = default;
};

struct CheckpointSection {
  int64_t every = 200;  // steps; 0: at the end alone
  int64_t keep = 3;

  friend bool operator==(const CheckpointSection&, const CheckpointSection&) = default;
};

struct MemorySection {
  int64_t caches = 1792;  // MiB: memory/caches.h

  friend bool operator==(const MemorySection&, const MemorySection&) = default;
};

struct Config {
  std::string device = "auto";  // "auto", "cpu", "cuda"
  double timeout = 300;         // seconds: deadline of each communication
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

// The model in the folder given.model.from, as its config.json describes it (huggingface/model_config.h). `given` has
// the keys that are given, and is no whole configuration.
struct Config;
using ModelReader = std::function<ModelSection(const Config& given)>;

// Reads the file, then applies `sets`, each "section.key=value" with a value in TOML or, where it is no TOML, taken as
// a string. Raises Error(kInput) for a file that is missing or no TOML, Error(kUsage) for an unknown key (the nearest
// one is named), a wrong type, a value out of range, or values that do not fit together; with file, line and key.
//
// Where model.from names a folder, `read_model` says what [model] is but for the keys that are given; of these, keys of
// the model's shape must be what the folder has, and the rotary embedding's base and scaling may be others. Without
// `read_model`, as where a run's own configuration is read, which has every key, nobody looks into the folder.
Config load_config(const std::string& path, const std::vector<std::string>& sets = {},
                   const ModelReader& read_model = {});

// The same from a text; `source` stands for the file in messages.
Config parse_config(std::string_view toml, std::string_view source, const std::vector<std::string>& sets = {},
                    const ModelReader& read_model = {});

// The whole configuration as TOML; load_config of it gives an equal Config.
std::string to_toml(const Config& config);

// A key, "section.key", and its value as it is written.
struct KeyText {
  std::string key, value;

  friend bool operator==(const KeyText&, const KeyText&) = default;
};

// Every key, in the table's order: what ranks compare at bootstrap.
std::vector<KeyText> flatten(const Config& config);

// A key that two configurations give different values, as they are written.
struct ChangedKey {
  std::string key, was, is;
  // Weights that were trained with the one mean nothing with the other. model.pattern is not of these: what a query
  // sees may be extended and trained on.
  bool of_model = false;
};
std::vector<ChangedKey> changed_keys(const Config& before, const Config& now);

// Markdown table of every key: default, range, meaning. docs/configuration.md and `train --help-config` show it.
std::string config_reference();

}  // namespace annulus
