// See sampler.h.
#include "training/sampler.h"

#include <algorithm>
#include <iostream>
#include <optional>
#include <vector>

#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "common/text.h"
#include "config/config.h"
#include "memory/caches.h"
#include "model/generator.h"
#include "tensor_files/block_map_file.h"
#include "training/run/checkpoint.h"
#include "training/run/run_folder.h"
#include "training/training.h"

namespace annulus {
namespace {

constexpr int64_t kByteTokens = 256;

void check(const SampleOptions& o) {
  const auto refuse = [](const std::string& message) { throw Error(ErrorKind::kUsage, "sample", message); };
  if (o.bytes < 0) refuse("--bytes must not be negative, but is " + std::to_string(o.bytes));
  if (!(o.temperature >= 0)) refuse("--temperature must not be negative, but is " + exact(o.temperature));
  if (o.top_k < 0) refuse("--top-k must not be negative, but is " + std::to_string(o.top_k));
}

TrainingState newest_state(CheckpointStore& store, const Config& config, const std::string& run, std::ostream& notes) {
  std::vector<std::string> skipped;
  std::optional<TrainingState> state = store.load_newest_valid(&skipped, CheckpointPart::kModel);
  for (const std::string& reason : skipped) notes << "passed over a checkpoint: " << reason << std::endl;
  if (!state) {
    throw Error(ErrorKind::kInput, "sample",
                "there is no whole checkpoint in " + run +
                    (skipped.empty() ? ": training writes the first after " +
                                           (config.checkpoint.every > 0
                                                ? "checkpoint.every = " + counted(config.checkpoint.every, "step")
                                                : "run.steps = " + counted(config.run.steps, "step"))
                                     : " (" + std::to_string(skipped.size()) + " damaged)"));
  }
  return std::move(*state);
}

Model load_model(const Config& config, const TrainingState& state) {
  Model model(model_shape(config), static_cast<uint64_t>(config.run.seed));
  restore_tensors(state, model.parameters().views(model.parameters().values()));
  model.parameters().refresh_leaves();
  return model;
}

// Of each layer, or one for all, with block maps read from their files. They are those of a batch; a text is its row 0.
std::vector<PatternSpec> patterns(const Config& c, std::ostream& notes) {
  AttentionShape shape{.batch = c.data.batch,
                       .heads = c.model.heads,
                       .kv_heads = c.model.kv_heads,
                       .q_len = c.data.context.longest(),
                       .k_len = c.data.context.longest(),
                       .query_offset = 0};
  std::vector<PatternSpec> patterns;
  for (size_t i = 0; i < std::max<size_t>(1, c.model.pattern.each.size()); ++i) {
    patterns.push_back(of_batch_rows(read_block_maps(c.model.pattern.of(static_cast<int64_t>(i)), shape), 0, 1));
  }
  shape.batch = 1;
  if (std::any_of(patterns.begin(), patterns.end(), [&](const PatternSpec& p) { return sees_later(p, shape); })) {
    notes << "model.pattern lets a query see later keys, which a text that is being written does not have: this model "
             "was trained for another use"
          << std::endl;
  }
  return patterns;
}

}  // namespace

int run_sample(const SampleOptions& o) {
  check(o);
  std::ostream& out = o.out != nullptr ? *o.out : std::cout;
  const std::string run = find_run(o.root, o.run);
  const Config config = load_config(run + "/config.toml");
  set_cache_total(config.memory.caches << 20);
  std::ostream& notes = o.notes != nullptr ? *o.notes : std::cerr;
  CheckpointStore store(run, config.checkpoint.keep);
  const Model model = load_model(
      config, o.step ? store.load(*o.step, CheckpointPart::kModel) : newest_state(store, config, run, notes));
  Generator generator(model, patterns(config, notes), config.data.context.longest());
  Utf8Stream text;
  std::vector<int64_t> tokens;
  for (const char c : o.prompt) {
    const auto byte = static_cast<unsigned char>(c);
    tokens.push_back(byte);
    out << text.push(byte);
  }
  if (tokens.empty()) tokens.push_back('\n');  // something to begin with; it is not shown
  out << std::flush;
  for (int64_t i = 0; i < o.bytes && !interrupted(); ++i) {
    const int64_t next = pick(generator.feed(tokens), kByteTokens, o.temperature, o.top_k, o.seed, i);
    tokens.assign(1, next);
    out << text.push(static_cast<unsigned char>(next)) << std::flush;
  }
  out << text.finish() << std::endl;
  // A reader that left early has interrupted the run.
  if (!out && !interrupted())
    throw Error(ErrorKind::kResource, "sample", "the text could not be written: is the disk full?");
  return interrupted() ? interrupt_exit_code() : 0;
}

}  // namespace annulus
