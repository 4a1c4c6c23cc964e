// See sampler.h.
#include "training/sampler.h"

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "common/text.h"
#include "config/config.h"
#include "data/shards/token_table.h"
#include "data/shards/tokenization.h"
#include "memory/caches.h"
#include "model/generator.h"
#include "tensor_files/block_map_file.h"
#include "training/run/checkpoint.h"
#include "training/run/run_folder.h"
#include "training/training.h"

namespace annulus {
namespace {

// What ids mean. This one: bytes.
class Alphabet {
 public:
  virtual ~Alphabet() = default;
  virtual int64_t size() const { return 256; }
  virtual std::vector<int64_t> encode(const std::string& prompt) const {
    std::vector<int64_t> ids;
    for (const char c : prompt) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  // Of tokens one after the other.
  virtual std::string bytes(int64_t id) { return {static_cast<char>(id)}; }
  // Something to write from where there is no prompt. It is not shown.
  virtual int64_t beginning() const { return '\n'; }
  virtual int64_t end() const { return -1; }  // of a document; -1: there is none
};

// Ids of the tokenizer that a run keeps.
class Ids : public Alphabet {
 public:
  Ids(const SampleOptions& options, std::string folder)
      : encode_(options.encode),
        folder_(std::move(folder)),
        table_(TokenTable::load(folder_ + "/tokens.table")),
        text_(table_),
        made_(Tokenizations().of_folder(folder_)) {}

  int64_t size() const override { return table_.size(); }
  std::vector<int64_t> encode(const std::string& prompt) const override {
    std::vector<int64_t> ids = encode_(folder_, prompt);
    for (const int64_t id : ids) table_.bytes(id);  // raises for one that there is not
    return ids;
  }
  std::string bytes(int64_t id) override {
    std::string bytes;
    text_.append(id, bytes);
    return bytes;
  }
  int64_t beginning() const override {
    if (made_ && made_->end) return *made_->end;  // behind a document's end another one begins
    throw Error(ErrorKind::kUsage, "sample",
                "the documents that the run was trained on have no token of their own at their beginning or end to "
                "write from: give a --prompt");
  }
  int64_t end() const override { return made_ && made_->end ? *made_->end : -1; }

 private:
  std::function<std::vector<int64_t>(const std::string&, const std::string&)> encode_;
  std::string folder_;
  TokenTable table_;
  TokenText text_;
  std::shared_ptr<const Tokenization> made_;
};

std::unique_ptr<Alphabet> make_ids(const SampleOptions& options, const std::string& run) {
  const std::string folder = tokenizer_folder(run);
  std::error_code error;
  if (!options.encode || !std::filesystem::is_regular_file(folder + "/tokens.table", error)) {
    throw Error(ErrorKind::kInput, "sample",
                "the run was trained on ids of tokens, and there is no " + folder +
                    "/tokens.table that says what they mean: the shards had none beside them (annulus tokenize writes "
                    "one); put that of their tokenizer there");
  }
  return std::make_unique<Ids>(options, folder);
}

void check(const SampleOptions& o) {
  const auto refuse = [](const std::string& message) { throw Error(ErrorKind::kUsage, "sample", message); };
  if (o.tokens < 0) refuse("--tokens must not be negative, but is " + std::to_string(o.tokens));
  if (!(o.temperature >= 0)) refuse("--temperature must not be negative, but is " + exact(o.temperature));
  if (o.top_k < 0) refuse("--top-k must not be negative, but is " + std::to_string(o.top_k));
}

TrainingState newest_state(CheckpointStore& store, const Config& config, const std::string& run, std::ostream& notes) {
  std::vector<std::string> skipped;
  std::optional<TrainingState> state =
      store.open_newest_valid(*make_self_communicator(), &skipped, CheckpointPart::kModel);
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

// Of the step that was asked for, or else of the newest one that is whole.
TrainingState read_weights(const SampleOptions& o, const Config& config, const std::string& run, std::ostream& notes,
                           Parameters& weights) {
  CheckpointStore store(run, config.checkpoint.keep);
  for (;;) {
    TrainingState state =
        o.step ? store.open(*o.step, CheckpointPart::kModel) : newest_state(store, config, run, notes);
    try {
      store.read(state, whole_slices(weights.value_views()));
    } catch (const Error& error) {
      // A live run may have removed it since it was opened: then there is a newer one.
      std::error_code unknown;
      if (o.step || error.kind() != ErrorKind::kInput || std::filesystem::exists(state.folder, unknown)) throw;
      continue;
    }
    return state;
  }
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
  Model model(model_shape(config), static_cast<uint64_t>(config.run.seed));
  const TrainingState state = read_weights(o, config, run, notes, model.parameters());
  const auto token = state.extra.find("token");
  const bool ids = token != state.extra.end() && token->second == "id";
  const std::unique_ptr<Alphabet> alphabet = ids ? make_ids(o, run) : std::make_unique<Alphabet>();
  Generator generator(model, patterns(config, notes), config.data.context.longest());
  Utf8Stream text;
  const auto show = [&](int64_t id) {
    for (const char c : alphabet->bytes(id)) out << text.push(static_cast<unsigned char>(c));
  };
  std::vector<int64_t> tokens = alphabet->encode(o.prompt);
  for (const int64_t id : tokens) show(id);
  if (tokens.empty()) tokens.push_back(alphabet->beginning());
  out << std::flush;
  for (int64_t i = 0; i < o.tokens && !interrupted(); ++i) {
    const int64_t next = pick(generator.feed(tokens), alphabet->size(), o.temperature, o.top_k, o.seed, i);
    if (next == alphabet->end()) break;
    tokens.assign(1, next);
    show(next);
    out << std::flush;
  }
  out << text.finish() << std::endl;
  // A reader that left early has interrupted the run.
  if (!out && !interrupted())
    throw Error(ErrorKind::kResource, "sample", "the text could not be written: is the disk full?");
  return interrupted() ? interrupt_exit_code() : 0;
}

}  // namespace annulus
