// See evaluation.h.
#include "runtime/evaluation/evaluation.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "attention/plan/choice.h"
#include "common/error.h"
#include "common/files.h"
#include "common/logging/log.h"
#include "common/names.h"
#include "common/text.h"
#include "common/trace/beat.h"
#include "memory/device_memory.h"
#include "runtime/data/packing.h"
#include "runtime/data/shards/token_table.h"
#include "runtime/evaluation/evaluation_forward.h"
#include "runtime/evaluation/loss_curves.h"
#include "runtime/inference/generator.h"
#include "runtime/tasks/task.h"
#include "runtime/tensor_files/model_dtypes.h"
#include "runtime/training/memory_plan.h"

namespace annulus {
namespace {

constexpr int64_t kLongestRows = int64_t{1} << 40;

// About how many positions a rank computes at once.
constexpr int64_t kPositions = 8192;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, "evaluate", message); }

EvaluationDataSettings data_settings(const EvaluationOptions& o, const OpenedModel& opened) {
  EvaluationDataSettings settings{.data = {}, .length = o.length.value_or(opened.context()), .rows = o.rows};
  settings.vocab = opened.model().vocab;
  if (opened.run()) settings.data = opened.run()->data;
  settings.held_out = o.data == std::vector<std::string>{"held-out"};
  if (!settings.held_out) {
    settings.data.max_bytes = 0;
    settings.data.long_documents = "cut";
    settings.data.train.list.clear();
    for (const std::string& source : o.data) settings.data.train.list.push_back(parse_source(source, "--data"));
  }
  if (o.packing) settings.data.packing = *o.packing;
  if (o.documents) settings.data.documents = *o.documents;
  return settings;
}

}  // namespace

void check_options(const EvaluationOptions& o) {
  if (o.model.empty()) refuse("expected a model: a run, or a folder in Hugging Face's layout");
  if (o.data.empty() && o.tasks.empty()) {
    refuse("expected --data FILE (losses; held-out: the documents that a run held out) or --task NAME (" +
           join(task_names(), ", ") + ", ruler)");
  }
  if (o.data.size() > 1 && std::find(o.data.begin(), o.data.end(), "held-out") != o.data.end()) {
    refuse("--data held-out stands for all sources of the run and cannot be combined with files");
  }
  for (const std::string& source : o.data) parse_source(source, "--data");
  if (o.length && (*o.length < 1 || *o.length > kLongestRows)) {
    refuse("--length must be from 1 to " + with_commas(kLongestRows) + ", but is " + with_commas(*o.length));
  }
  if (o.rows < 0) refuse("--rows must not be negative, but is " + std::to_string(o.rows));
  if (o.packing) index_of_name(*o.packing, {"stream", "best-fit", "document"}, "packing", "--packing");
  if (o.data.empty() && (o.length || o.rows > 0 || o.packing || o.documents)) {
    refuse("--length, --rows, --packing and --documents are about --data, which is missing");
  }
  if (o.tasks.empty() &&
      (!o.lengths.empty() || o.generate || o.pairs != 0 || !o.haystack.empty() || !o.needles.empty())) {
    refuse("--lengths, --generate, --pairs, --haystack and --needle are about --task, which is missing");
  }
  for (const std::string& task : o.tasks) tasks_of(task);
  if (o.pairs != 0 && std::find(o.tasks.begin(), o.tasks.end(), "kv") == o.tasks.end()) {
    refuse("--pairs is about --task kv, which is missing");
  }
  for (const int64_t length : o.lengths) {
    if (length < 1 || length > kLongestRows) {
      refuse("--lengths must be from 1 to " + with_commas(kLongestRows) + ", but one is " + with_commas(length));
    }
  }
  for (const double depth : o.depths) {
    if (!(depth >= 0 && depth <= 1)) refuse("--depths are in percent, 0 to 100, but one is " + exact(100 * depth));
  }
  if (o.depths.empty()) refuse("expected at least one of --depths");
  if (o.trials < 1) refuse("--trials must be at least 1, but is " + std::to_string(o.trials));
  check_options(o.attention);
  if (!(o.timeout > 0)) refuse("--timeout must be above 0 seconds");
}

EvaluationJob::EvaluationJob(const EvaluationOptions& options, int ranks)
    : options_((check_options(options), options)), opened_(options.model, options.root, options.step), ranks_(ranks) {
  kernel_ = parse_kernel(options.attention.kernel, "--kernel");
  validate(opened_.model());
  if (options.data == std::vector<std::string>{"held-out"} && !opened_.run()) {
    refuse("--data held-out is for runs, which hold documents out; " + options.model +
           " is a folder in Hugging Face's layout: name files");
  }
  if (opened_.run()) bound_memory(opened_.run()->memory);
  const auto require_rows = [&](int64_t length, bool apart) {
    return row_requests(opened_.model(), options.attention, shape_of(length, apart), ranks, /*backward=*/false,
                        "evaluate");
  };
  if (!options.data.empty()) {
    data_.emplace(data_settings(options, opened_));
    const LayerRequests layers = require_rows(data_->length(), data_->documents_apart());
    for (size_t i = 0; i < data_->sources(); ++i) {
      if (data_->corpus(i).has_trees()) require_causal(layers.distinct);
    }
  }
  std::vector<int64_t> lengths = options.lengths;
  if (lengths.empty()) lengths.push_back(opened_.context());
  const auto add = [&](const Cell& cell) {  // each once, however often it is named
    if (std::find(cells_.begin(), cells_.end(), cell) == cells_.end()) cells_.push_back(cell);
  };
  for (const std::string& named : options.tasks) {
    for (const std::string& task : tasks_of(named)) {
      for (const int64_t length : lengths) {
        require_rows(length, /*apart=*/false);
        if (!has_depth(task)) {
          add({task, length, std::nullopt});
          continue;
        }
        for (const double depth : options.depths) add({task, length, depth});
      }
    }
  }
  if (!options.generate || ranks == 1) return;
  for (const PatternSpec& pattern : decoding_patterns(lengths[0])) {
    if (!is_adaptive(pattern)) continue;
    throw Error(ErrorKind::kUsage, "evaluate",
                "--generate needs one rank with a pattern that selects its blocks: leave it out, or start one rank");
  }
}

int64_t EvaluationJob::rows_at_once(int64_t length) const { return std::max<int64_t>(1, kPositions * ranks_ / length); }

std::vector<Field> EvaluationJob::fields() const {
  std::string cells;
  for (const Cell& cell : cells_) {
    cells += cell.task + " " + std::to_string(cell.length) + (cell.depth ? " " + exact(*cell.depth) : "") + "; ";
  }
  return {{"data", data_ ? data_->fingerprint() : "none"},
          {"tasks", cells + std::to_string(options_.trials) + " trials, seed " + std::to_string(options_.seed)},
          {"patterns", opened_.model().pattern.text() + options_.attention.pattern},
          {"vocabulary", std::to_string(opened_.model().vocab)},
          {"rotary embedding", opened_.model().rotaries().text()},
          {"layout", options_.attention.layout.value_or("zigzag") + ", " + options_.attention.schedule + ", within " +
                         std::to_string(options_.attention.within)},
          {"dtype", options_.dtype + (options_.sharded ? ", sharded" : "")},
          {"kernel", std::string(to_string(kernel_))}};
}

std::vector<RowShape> EvaluationJob::shapes() const {
  std::vector<RowShape> all;
  if (data_) all.push_back(shape_of(data_->length(), data_->documents_apart()));
  for (const Cell& cell : cells_) all.push_back(shape_of(cell.length, /*apart=*/false));
  return all;
}

// The most bytes that this rank holds during forwards of rows of this shape; null: without attention.
double EvaluationJob::bytes_of_rank(const LayerRequests* layers, const RowShape& shape, const Communicator& world,
                                    at::Device device) const {
  const ModelShape& s = opened_.model();
  const Computes on{model_dtype(options_.dtype, "--dtype"), device.is_cuda()};
  const double weights = InferenceModel::weight_bytes(s, on, world.size(), options_.sharded);
  if (weights > 0x1p53) return weights;
  const int64_t ranks = world.size();
  const int64_t own = layers != nullptr ? row_layout(*layers).count(world.rank()) : (shape.length + ranks - 1) / ranks;
  const int64_t counted = std::min(shape.rows * own, loss_chunk_rows(s.vocab, on.dtype));
  // Logits, and what is compared with them; tokens, targets and scores of whole rows.
  const int64_t logits = 2 * counted * s.vocab * on.wide() + shape.rows * shape.length * 48;
  const int64_t forward = layers != nullptr ? row_forward_bytes(s, *layers, shape.rows, world.rank(), kernel_, on)
                                            : layer_forward_bytes(s, shape.rows, own, on);
  return weights + static_cast<double>(forward + logits);
}

RowChoices EvaluationJob::choices(Communicator& world, int ranks_here, at::Device device) const {
  RowChoices::Settings settings{.model = opened_.model(),
                                .options = options_.attention,
                                .module = "evaluate",
                                .device = device,
                                .free = {},
                                .bytes = [this, &world, device](const LayerRequests& layers, const RowShape& shape) {
                                  return bytes_of_rank(&layers, shape, world, device);
                                }};
  settings.model.dtype = options_.dtype;
  if (const std::optional<AvailableMemory> free = available_memory(device)) {
    settings.free = static_cast<double>(free->bytes) / (device.is_cuda() ? 1 : ranks_here);
  }
  return RowChoices(std::move(settings), world);
}

void EvaluationJob::require_memory(RowChoices& choices, Communicator& world, int ranks_here, at::Device device) const {
  const OpLabel label{"evaluate, planning the memory"};
  const Computes on{model_dtype(options_.dtype, "--dtype"), device.is_cuda()};
  double bytes = 0;
  const auto require = [&] {
    require_free("evaluate", "weights and a forward", bytes * (device.is_cuda() ? 1 : ranks_here), ranks_here, device,
                 "use more hosts, --sharded, --dtype bf16 or shorter rows");
  };
  // Before attention is planned, for which rows may be much too long.
  together(world, label, [&] {
    for (const RowShape& shape : shapes()) bytes = std::max(bytes, bytes_of_rank(nullptr, shape, world, device));
    for (const Cell& cell : cells_) {
      if (!options_.generate || bytes > 0x1p53) continue;
      const CacheSettings cache{.context = cell.length, .positions = cell.length};
      const std::vector<PatternSpec> patterns = decoding_patterns(cell.length);
      bytes = std::max(bytes, InferenceModel::weight_bytes(opened_.model(), on, world.size(), options_.sharded) +
                                  generation_bytes(opened_.model(), patterns, cache, on, world.size()));
    }
    require();
  });
  for (const RowShape& shape : shapes()) {
    const LayerRequests& layers = choices.of(shape);
    together(world, label, [&] {
      bytes = std::max(bytes, bytes_of_rank(&layers, shape, world, device));
      require();
    });
  }
}

void EvaluationJob::evaluate_data(Forward& forward, size_t source, EvaluationResults& results) const {
  const EvaluationData& data = *data_;
  const int64_t length = data.length(), rows = data.rows(source), at_once = rows_at_once(length);
  const std::string label = "evaluate, " + data.name(source);
  LossCurves curves(length);
  std::optional<TokenTable> table;
  const bool weighs = data.corpus(source).weighs_targets();
  double bytes = 0;  // of the targets, each times its weight
  together(
      forward.world, {label + ", reading the table of tokens"},
      [&] {
        const std::string file = data.corpus(source).folder() + "/tokens.table";
        if (!data.is_text() && is_file(file)) table = TokenTable::load(file);
      },
      /*only_first=*/true);
  for (int64_t first = 0; first < rows; first += at_once) {
    const int64_t count = std::min(at_once, rows - first);
    results.stopped = results.stopped || forward.stopped({label + ", asking whether to stop"});
    if (results.stopped) break;
    ForwardRows of{.tokens = at::empty({count, length}, at::kLong)};
    at::Tensor targets = at::empty({count, length}, at::kLong);
    const at::Tensor weights = weighs ? at::empty({count, length}, at::kFloat) : at::Tensor();
    const auto weights_of = [&](int64_t i) { return weighs ? weights.data_ptr<float>() + i * length : nullptr; };
    std::vector<std::vector<Piece>> pieces;
    together(forward.world, {label + ", reading rows"}, [&] {
      for (int64_t i = 0; i < count; ++i) {
        pieces.push_back(data.row(source, first + i));
        data.read(source, pieces.back(), of.tokens[i].data_ptr<int64_t>(), targets[i].data_ptr<int64_t>(),
                  weights_of(i));
        if (data.documents_apart() || data.positions_restart()) of.parts.push_back(data.parts(pieces.back()));
      }
    });
    of.restart = data.positions_restart();
    of.apart = data.documents_apart();
    const TokenScores scores = forward.score(of, targets, label);
    if (!scores.nats.defined()) continue;
    for (int64_t i = 0; i < count; ++i) {
      int64_t begin = 0;
      const double* nats = scores.nats[i].const_data_ptr<double>();
      const int64_t* wanted = targets[i].const_data_ptr<int64_t>();
      for (const Piece& piece : pieces[static_cast<size_t>(i)]) {
        const int64_t first =
            piece.after < 0 ? 0 : path_positions(of.parts[static_cast<size_t>(i)], {{begin, 1, 1}})[0];
        curves.add(data.document_of(source, piece.token), begin, piece.count, nats + begin, wanted + begin,
                   weighs ? weights_of(i) + begin : nullptr, first);
        begin += piece.count;
      }
      curves.end_row();
      for (int64_t p = 0; table && p < length; ++p) {
        // Special tokens stand for no bytes, and a model may have more ids than its tokenizer.
        const bool ordinary = wanted[p] >= 0 && wanted[p] < table->size() && !table->hidden(wanted[p]);
        if (!ordinary) continue;
        bytes +=
            (weighs ? static_cast<double>(weights_of(i)[p]) : 1) * static_cast<double>(table->bytes(wanted[p]).size());
      }
    }
  }
  if (forward.world.rank() != 0) return;
  SourceLosses losses = curves.finish();
  losses.name = data.name(source);
  if (data.is_text()) bytes = static_cast<double>(losses.all.targets);
  if (bytes > 0) losses.bits_per_byte = losses.all.nats / std::log(2.0) / bytes;
  results.sources.push_back(std::move(losses));
}

void EvaluationJob::run(Communicator& world, int ranks_here, at::Device device, EvaluationResults& results) {
  const ExpectProgress expected;
  auto loading = std::make_unique<LongPhase>();
  world.set_timeout(Seconds(options_.timeout));
  world.host().set_timeout(Seconds(options_.timeout));
  RowChoices choices = this->choices(world, ranks_here, device);
  require_memory(choices, world, ranks_here, device);
  const at::ScalarType dtype = model_dtype(options_.dtype, "--dtype");
  Forward forward(opened_, {.dtype = dtype, .device = device, .sharded = options_.sharded}, world, choices, kernel_);
  results.model = options_.model;
  results.step = opened_.step();
  results.ranks = world.size();
  results.context = opened_.context();
  results.layout = options_.attention.layout.value_or("zigzag");
  if (results.layout == kAutoLayout) {
    std::set<std::string> chosen;
    for (const RowShape& shape : shapes()) {
      chosen.emplace(to_string(choices.of(shape).distinct[0].layout));
    }
    results.layout += ": " + join({chosen.begin(), chosen.end()}, ", ");
  }
  results.dtype = options_.dtype;
  const int64_t longest = cells_.empty() ? 0 : std::max_element(cells_.begin(), cells_.end(), [](auto& a, auto& b) {
                                                 return a.length < b.length;
                                               })->length;
  if (const int64_t most = std::max(longest, data_ ? data_->length() : 0); most > opened_.context()) {
    log_warn_once_per_job("evaluate", "rows of " + counted(most, "token") + " are longer than those of the training, " +
                                          with_commas(opened_.context()));
  }
  TaskSettings tasks;
  Decoder decoder;
  together(
      world, {"evaluate, preparing the tasks"},
      [&] {
        require_tokens_of_the_model();
        tasks = task_settings();
        if (options_.generate && tasks.encode) decoder = this->decoder();
      },
      /*only_first=*/true);
  // Before anything is computed, what is too short for its task is found for the first prompt of each cell.
  for (const Cell& cell : cells_) {
    together(
        world, {"evaluate, the first prompt of " + cell.task}, [&] { make_prompt(settings_of(cell, tasks), 0); },
        /*only_first=*/true);
  }
  const auto count_costs = [&] {
    results.seconds = forward.seconds;
    results.cpu_seconds = forward.cpu_seconds;
    results.forward_tokens = forward.tokens;
  };
  loading.reset();
  try {
    for (size_t source = 0; data_ && source < data_->sources(); ++source) evaluate_data(forward, source, results);
    for (const Cell& cell : cells_) {
      if (!results.stopped) evaluate_cell(forward, cell, settings_of(cell, tasks), decoder, results);
    }
  } catch (...) {
    results.stopped = true;
    count_costs();
    throw;
  }
  count_costs();
  at::Tensor cpu = at::full({1}, forward.cpu_seconds, at::kDouble);
  if (world.size() > 1) world.host().all_reduce(cpu, ReduceOp::kSum, {"evaluate, the CPU time"});
  results.cpu_seconds = cpu.item<double>();
}

}  // namespace annulus
