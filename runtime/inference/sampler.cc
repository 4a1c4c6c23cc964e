// See sampler.h.
#include "runtime/inference/sampler.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "memory/caches.h"
#include "runtime/config/config.h"
#include "runtime/data/shards/token_table.h"
#include "runtime/data/shards/tokenization.h"
#include "runtime/huggingface/text_ids.h"
#include "runtime/inference/opened_model.h"
#include "runtime/model/generator.h"
#include "runtime/run/run_folder.h"
#include "runtime/tensor_files/block_map_file.h"
#include "runtime/tensor_files/model_dtypes.h"

namespace annulus {
namespace {

// The meaning of token ids. In this base class, they are bytes.
class Alphabet {
 public:
  virtual ~Alphabet() = default;
  virtual int64_t size() const { return 256; }
  virtual std::vector<int64_t> encode(const std::string& prompt) const {
    std::vector<int64_t> ids;
    for (const char c : prompt) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  // The bytes of the next token. Call it once for each token, in their order.
  virtual std::string bytes(int64_t id) { return {static_cast<char>(id)}; }
  // The token to begin with if there is no prompt. It is not shown.
  virtual int64_t beginning() const { return '\n'; }
  virtual bool ends(int64_t /*id*/) const { return false; }  // whether it ends a document
};

using Encode = std::function<std::vector<int64_t>(const std::string& folder, const std::string& prompt)>;

// Ids of a tokenizer. `ends` are the ids that end a document. `prefix` is put before a prompt if the tokenizer's
// library does not do so itself.
class Ids : public Alphabet {
 public:
  Ids(Encode encode, std::string folder, const std::string& table, std::vector<int64_t> ends,
      std::optional<int64_t> beginning, std::optional<int64_t> prefix = {})
      : encode_(std::move(encode)),
        folder_(std::move(folder)),
        table_(TokenTable::load(table)),
        text_(table_),
        ends_(std::move(ends)),
        beginning_(beginning),
        prefix_(prefix) {}

  int64_t size() const override { return table_.size(); }
  std::vector<int64_t> encode(const std::string& prompt) const override {
    std::vector<int64_t> ids = encode_(folder_, prompt);
    for (const int64_t id : ids) table_.bytes(id);  // throws for an id that is not in the table
    if (prefix_ && (ids.empty() || ids[0] != *prefix_)) ids.insert(ids.begin(), *prefix_);
    return ids;
  }
  std::string bytes(int64_t id) override {
    std::string bytes;
    text_.append(id, bytes);
    return bytes;
  }
  int64_t beginning() const override {
    if (beginning_) return *beginning_;
    throw Error(ErrorKind::kUsage, "sample",
                "this model has no token at the beginning or end of documents from which text could start: give a "
                "--prompt");
  }
  bool ends(int64_t id) const override { return std::find(ends_.begin(), ends_.end(), id) != ends_.end(); }

 private:
  Encode encode_;
  std::string folder_;
  TokenTable table_;
  TokenText text_;
  std::vector<int64_t> ends_;
  std::optional<int64_t> beginning_, prefix_;
};

// The ids of a run, from the tokenizer that was beside its shards.
std::unique_ptr<Alphabet> ids_of_run(const SampleOptions& options, const std::string& run) {
  const std::string folder = tokenizer_folder(run), table = folder + "/tokens.table";
  if (!options.encode || !is_file(table)) {
    throw Error(ErrorKind::kInput, "sample",
                "the run was trained on ids of tokens, but there is no " + table +
                    " that says what they mean: there was none beside the shards (annulus tokenize writes one); put "
                    "the table of their tokenizer there");
  }
  const std::shared_ptr<const Tokenization> made = Tokenizations().of_folder(folder);
  const std::optional<int64_t> end = made ? made->end : std::nullopt;
  // The token that ends a document is also where the next one begins.
  return std::make_unique<Ids>(options.encode, folder, table, end ? std::vector<int64_t>{*end} : std::vector<int64_t>(),
                               end);
}

// The ids of a folder in Hugging Face's layout.
std::unique_ptr<Alphabet> ids_of_folder(const SampleOptions& options, const std::string& folder) {
  if (!options.encode || !options.make_table) {
    throw Error(ErrorKind::kUnavailable, "sample",
                "this program has no tokenizer (annulus sample has one) to encode a prompt for " + folder);
  }
  const TextIds ids = read_text_ids(folder);
  const std::string table = options.make_table(folder);
  const std::unique_ptr<const std::string, void (*)(const std::string*)> remove(
      &table, [](const std::string* path) { ::unlink(path->c_str()); });
  // sentencepiece adds no begin token by itself, although Llama 2 and Mistral were trained with one. (Qwen has none.)
  const bool adds = is_file(folder + "/tokenizer.json");
  return std::make_unique<Ids>(options.encode, folder, table, ids.ends, ids.begin, adds ? std::nullopt : ids.begin);
}

// Passes text on, piece by piece, until the first of some strings. Text that may be the beginning of one is held back.
class UntilStop {
 public:
  explicit UntilStop(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Adds text and returns what can be shown now.
  std::string push(const std::string& text) {
    held_ += text;
    size_t end = std::string::npos, keep = 0;
    for (const std::string& stop : stops_) {
      end = std::min(end, held_.find(stop));
      for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
        if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
      }
    }
    stopped_ = end != std::string::npos;
    const std::string shown = held_.substr(0, stopped_ ? end : held_.size() - keep);
    held_.erase(0, stopped_ ? held_.size() : shown.size());
    return shown;
  }
  bool stopped() const { return stopped_; }
  // Returns the text that is still held back.
  std::string finish() { return std::exchange(held_, ""); }

 private:
  const std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

void check(const SampleOptions& o) {
  const auto refuse = [](const std::string& message) { throw Error(ErrorKind::kUsage, "sample", message); };
  if (o.tokens < 0) refuse("--tokens must not be negative, but is " + std::to_string(o.tokens));
  if (!(o.temperature >= 0)) refuse("--temperature must not be negative, but is " + exact(o.temperature));
  if (o.top_k < 0) refuse("--top-k must not be negative, but is " + std::to_string(o.top_k));
  if (!(o.top_p > 0 && o.top_p <= 1)) refuse("--top-p must be above 0 and at most 1, but is " + exact(o.top_p));
  for (const std::string& stop : o.stop) {
    if (stop.empty()) refuse("--stop must not be empty");
  }
}

// The pattern of each layer, or one for all layers, with block maps read from their files. These maps are for a batch,
// of which the text is row 0.
std::vector<PatternSpec> patterns(const Config& c, const OpenedModel::Note& note) {
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
    note(
        "model.pattern lets a query see later keys, which do not exist yet while text is generated: this model was "
        "not trained to generate text");
  }
  return patterns;
}

}  // namespace

int run_sample(const SampleOptions& o) {
  check(o);
  std::ostream& out = o.out != nullptr ? *o.out : std::cout;
  const auto note = [&o](const std::string& text) {
    if (o.notes != nullptr) {
      *o.notes << text << std::endl;
    } else {
      log_warn("sample", text);
    }
  };
  OpenedModel opened(o.run, o.root, o.step);
  if (opened.run()) set_cache_total(opened.run()->memory.caches << 20);
  validate(opened.model());
  std::unique_ptr<Alphabet> alphabet;
  if (!opened.run()) alphabet = ids_of_folder(o, opened.path());
  Model model(opened.model(), model_dtype(o.dtype, "--dtype"), at::kCPU, Model::Unheld{});
  opened.load(model.parameters(), note);
  if (!alphabet) {
    alphabet = opened.tokens_are_ids() ? ids_of_run(o, opened.path()) : std::make_unique<Alphabet>();
  }
  std::vector<int64_t> tokens = alphabet->encode(o.prompt);
  const bool from_nothing = tokens.empty();
  if (from_nothing && !interrupted()) tokens.push_back(alphabet->beginning());
  for (const int64_t id : tokens) {
    if (id < opened.model().vocab) continue;
    throw Error(ErrorKind::kInput, "sample",
                "the tokenizer of " + opened.path() + " gives the id " + std::to_string(id) + ", but the model has " +
                    std::to_string(opened.model().vocab) + " of them (vocab_size): they do not belong together");
  }
  // Patterns of a folder, which are causal or windowed, do not depend on the length, so the context is no longer than
  // what is written.
  const int64_t written = static_cast<int64_t>(tokens.size()) + o.tokens + 1;
  Generator generator = opened.run() ? Generator(model, patterns(*opened.run(), note), opened.context())
                                     : Generator(model,
                                                 opened.model().pattern.each.empty()
                                                     ? std::vector<PatternSpec>{opened.model().pattern.all}
                                                     : opened.model().pattern.each,
                                                 std::min(opened.context(), written));
  Utf8Stream characters;
  UntilStop until(o.stop);
  const auto write = [&](const std::string& bytes) {
    if (!o.terminal) {
      out << bytes;
      return;
    }
    for (const char c : bytes) out << characters.push(static_cast<unsigned char>(c));
  };
  if (!from_nothing) {
    for (const int64_t id : tokens) write(alphabet->bytes(id));
  }
  out << std::flush;
  for (int64_t i = 0; i < o.tokens && !interrupted() && !until.stopped(); ++i) {
    const Choice choice{.temperature = o.temperature, .top_k = o.top_k, .top_p = o.top_p, .seed = o.seed};
    const int64_t next = pick(generator.feed(tokens), alphabet->size(), choice, i);
    if (alphabet->ends(next)) break;
    tokens.assign(1, next);
    write(until.push(alphabet->bytes(next)));
    out << std::flush;
  }
  if (!until.stopped()) write(until.finish());
  if (o.terminal) out << characters.finish() << "\n";
  out << std::flush;
  // A reader that has gone counts as an interrupt.
  if (!out && !interrupted())
    throw Error(ErrorKind::kResource, "sample", "the text could not be written: is the disk full?");
  return interrupted() ? interrupt_exit_code() : 0;
}

}  // namespace annulus
