// Implements `annulus evaluate`: losses of a model on data, by position, and its answers to tasks, over any number of
// ranks and without writing logits. Used by launcher/subcommands/evaluate.cc, which prints the results (report.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "runtime/data/shards/token_table.h"
#include "runtime/evaluation/evaluation_data.h"
#include "runtime/evaluation/results.h"
#include "runtime/inference/opened_model.h"
#include "runtime/inference/row_forward.h"
#include "runtime/tasks/task.h"

namespace annulus {

// Unchecked options of the user; check_options and EvaluationJob validate them.
struct EvaluationOptions {
  std::string model;          // a run, or a folder in Hugging Face's layout
  std::string root = "runs";  // the folder of named runs
  std::optional<int64_t> step;
  // Losses on data. A run's rows are made as in its training unless these say otherwise.
  std::vector<std::string> data;       // sources, as parse_source takes them, or "held-out": those of a run
  std::optional<int64_t> length;       // tokens of a row; default: the longest of the training
  std::optional<std::string> packing;  // "stream", "best-fit", "document"
  std::optional<bool> documents;       // whether tokens attend only to their own document
  int64_t rows = 0;                    // the most rows of a source, evenly spaced; 0: all
  // Tasks (task.h).
  std::vector<std::string> tasks;
  std::vector<int64_t> lengths;  // default: the longest rows of the training
  std::vector<double> depths = {0, 0.25, 0.5, 0.75, 1};
  int64_t trials = 10;  // at each length and depth
  uint64_t seed = 1;
  int64_t pairs = 0;      // of "kv", spread over the length; 0: as many as fit
  std::string haystack;   // a file of text
  bool generate = false;  // also decode an answer to each prompt, greedily
  std::vector<std::string> needles;
  // How it is computed.
  RowOptions attention;
  std::string dtype = "fp32";  // "fp32", "bf16", "fp64" (on CPUs)
  bool sharded = false;        // each rank keeps a part of the weights
  double timeout = 300;        // deadline of each communication, in seconds
  // Encoders of the tokenizer in a folder, for tasks on text, and the path of a new tokens.table
  // (runtime/data/shards/token_table.h), which the caller of the function removes. Empty: there is none.
  using Encode = std::function<std::vector<int64_t>(const std::string& text)>;
  std::function<Encode(const std::string& folder)> tokenizer{};
  std::function<std::string(const std::string& folder)> make_table{};
};

// Validates the options without reading files. Raises Error(kUsage).
void check_options(const EvaluationOptions& options);

// A job with validated model and data, before weights are loaded. Each rank makes an equal one without communication.
// Not thread safe.
class EvaluationJob {
 public:
  // Opens the model's description and the data. Raises Error(kUsage) for options, Error(kInput) for files, and
  // Error(kPlan) if lengths, heads or layout are incompatible with `ranks`.
  EvaluationJob(const EvaluationOptions& options, int ranks);

  // Returns the fields that must be equal on all ranks.
  std::vector<Field> fields() const;

  // Collective. Fills `results` as it goes, on ranks other than 0 without numbers; what has been measured stays there
  // if it raises. Computes on `device`, whose tensors `world` must be able to send. `ranks_here` is the number of ranks
  // that share this host's memory. Raises Error(kResource), before weights are read, if memory is insufficient;
  // Error(kInput) for data or a prompt of another tokenizer than the model's; and what loading, planning and
  // communication raise. On a request to stop (common/interrupt.h) it returns and sets results.stopped on all ranks.
  void run(Communicator& world, int ranks_here, at::Device device, EvaluationResults& results);

 private:
  struct Forward;  // a loaded model on this rank
  struct Cell {
    std::string task;
    int64_t length = 0;
    std::optional<double> depth;

    friend bool operator==(const Cell&, const Cell&) = default;
  };
  // What decoding needs of the model's tokenizer. Of rank 0.
  struct Decoder {
    std::optional<TokenTable> table;  // absent: tokens are bytes
    std::vector<int64_t> ends;        // ids that end a text
  };

  int64_t rows_at_once(int64_t length) const;
  RowShape shape_of(int64_t length, bool apart) const { return {rows_at_once(length), length, apart}; }
  std::vector<RowShape> shapes() const;  // of data and tasks
  double bytes_of_rank(const LayerRequests* layers, const RowShape& shape, const Communicator& world,
                       at::Device device) const;
  RowChoices choices(Communicator& world, int ranks_here, at::Device device) const;
  // Collective.
  void require_memory(RowChoices& choices, Communicator& world, int ranks_here, at::Device device) const;
  void evaluate_data(Forward& forward, size_t source, EvaluationResults& results) const;
  TaskSettings task_settings() const;
  static TaskSettings settings_of(const Cell& cell, TaskSettings settings);
  void evaluate_cell(Forward& forward, const Cell& cell, const TaskSettings& settings, const Decoder& decoder,
                     EvaluationResults& results) const;
  EvaluationOptions::Encode text_encoder() const;
  Decoder decoder() const;
  std::vector<PatternSpec> decoding_patterns(int64_t length) const;
  void require_tokens_of_the_model() const;
  // Decodes at most `room` tokens after the prompt, in a context of `length`. Collective.
  std::vector<int64_t> decode(Forward& forward, const std::vector<int64_t>& prompt, int64_t room, int64_t length,
                              const Decoder& decoder, EvaluationResults& results) const;

  EvaluationOptions options_;
  OpenedModel opened_;
  int ranks_;
  KernelKind kernel_ = KernelKind::kAuto;
  std::optional<EvaluationData> data_;
  std::vector<Cell> cells_;
};

}  // namespace annulus
