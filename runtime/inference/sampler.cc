// See sampler.h.
#include "runtime/inference/sampler.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/choice.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/names.h"
#include "common/text.h"
#include "runtime/config/config.h"
#include "runtime/data/shards/token_table.h"
#include "runtime/data/shards/tokenization.h"
#include "runtime/huggingface/text_ids.h"
#include "runtime/inference/generator.h"
#include "runtime/inference/inference_model.h"
#include "runtime/inference/kv_cache.h"
#include "runtime/inference/opened_model.h"
#include "runtime/run/run_folder.h"
#include "runtime/tensor_files/model_dtypes.h"
#include "runtime/training/memory_plan.h"

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

// Where the text goes, on rank 0.
class Writer {
 public:
  explicit Writer(const SampleOptions& o)
      : out_(o.out != nullptr ? *o.out : std::cout), terminal_(o.terminal), until_(o.stop) {}

  void write(const std::string& bytes) {
    if (!terminal_) {
      out_ << bytes;
      return;
    }
    for (const char c : bytes) out_ << characters_.push(static_cast<unsigned char>(c));
  }
  // The same for generated text, which ends before a stop string.
  void write_generated(const std::string& bytes) { write(until_.push(bytes)); }
  void flush() { out_ << std::flush; }
  bool stopped() const { return until_.stopped(); }
  void finish() {
    if (!until_.stopped()) write(until_.finish());
    if (terminal_) out_ << characters_.finish() << "\n";
    flush();
    // A reader that has gone counts as an interrupt.
    if (!out_ && !interrupted()) {
      throw Error(ErrorKind::kResource, "sample", "the text could not be written: is the disk full?");
    }
  }

 private:
  std::ostream& out_;
  const bool terminal_;
  Utf8Stream characters_;
  UntilStop until_;
};

[[noreturn]] void refuse_option(const std::string& message) { throw Error(ErrorKind::kUsage, "sample", message); }

// The dtype of cached keys and values; none: that of the model.
std::optional<at::ScalarType> cache_dtype(const std::string& name) {
  const std::vector<std::string> names = {"fp32", "bf16", "model"};
  const std::vector<std::optional<at::ScalarType>> types = {at::kFloat, at::kBFloat16, std::nullopt};
  return types[index_of_name(name, names, "dtype", "--cache")];
}

void check(const SampleOptions& o) {
  if (o.tokens < 0) refuse_option("--tokens must not be negative, but is " + std::to_string(o.tokens));
  if (!(o.temperature >= 0)) refuse_option("--temperature must not be negative, but is " + exact(o.temperature));
  if (o.top_k < 0) refuse_option("--top-k must not be negative, but is " + std::to_string(o.top_k));
  if (!(o.top_p > 0 && o.top_p <= 1)) {
    refuse_option("--top-p must be above 0 and at most 1, but is " + exact(o.top_p));
  }
  for (const std::string& stop : o.stop) {
    if (stop.empty()) refuse_option("--stop must not be empty");
  }
  cache_dtype(o.cache);
  if (o.layout) parse_layout_or_auto(*o.layout, "--layout");
  if (o.context && (*o.context < 1 || *o.context > int64_t{1} << 40)) {
    refuse_option("--context must be between 1 and 2^40, but is " + std::to_string(*o.context));
  }
  if (!(o.timeout > 0)) refuse_option("--timeout must be above 0 seconds");
}

// The sum of two counts, but at most `most`.
int64_t sum_up_to(int64_t most, int64_t a, int64_t b) { return a >= most || b >= most - a ? most : a + b; }

// Raises Error(kResource) if what the ranks of this host need is not free. The positions of the cache are known, or
// bounded by the bytes of the prompt.
void require_memory(const SampleOptions& o, const ModelShape& s, const std::vector<PatternSpec>& patterns,
                    const CacheSettings& cache, int ranks, int ranks_here) {
  const Computes on{model_dtype(o.dtype, "--dtype"), /*gpu=*/false};
  double bytes = InferenceModel::weight_bytes(s, on, ranks, o.sharded);
  // Otherwise sizes of a config.json would overflow the exact numbers of a forward.
  if (bytes < 0x1p53) bytes += generation_bytes(s, patterns, cache, on, ranks);
  require_free("sample", "weights, a cache of " + counted(cache.positions, "position") + " and the layers' memory",
               bytes * ranks_here, ranks_here, at::kCPU,
               std::string("start ranks on more hosts, ") + (o.sharded ? "" : "with --sharded, ") +
                   "or use --cache bf16, --dtype bf16, or fewer --tokens");
}

// What the ranks agree on before each token and at the beginning.
struct Decision {
  int64_t token = 0;
  bool ends = false;         // the text, after this token
  bool interrupted = false;  // any rank
};

// Collective. Returns what rank 0 decides, and raises its error on all ranks.
Decision decided(Communicator& world, OpLabel label, const std::function<Decision()>& decide) {
  const std::vector<Terms::Numbers> numbers = agree_together(world, label, [&]() -> Terms {
    const Decision own = world.rank() == 0 ? decide() : Decision();
    return {.alike = {}, .numbers = {own.token, own.ends, interrupted()}};
  });
  return {numbers[0][0], numbers[0][1] != 0,
          std::any_of(numbers.begin(), numbers.end(), [](const Terms::Numbers& n) { return n[2] != 0; })};
}

// Says what becomes of a text that does not fit the rows that the model was trained with.
void note_length(int64_t prompt, int64_t tokens, int64_t trained, int64_t context, const OpenedModel::Note& note) {
  if (prompt > context) {
    note("the prompt has " + with_commas(prompt, "token") + ", and the model reads at most " + with_commas(context) +
         " at once" + (context == trained ? ", as in its training" : "") + ": only the last " +
         with_commas(std::max<int64_t>(1, context / 2)) +
         " are read, which leaves room for as many more (--context N)");
  } else if (context > trained && sum_up_to(context, prompt, tokens) > trained) {
    note("text of up to " + with_commas(sum_up_to(context, prompt, tokens), "token") + " is longer than the " +
         with_commas(trained) + " of the rows that the model was trained with, as --context allows");
  }
}

}  // namespace

int run_sample(const SampleOptions& o, Communicator& world, int ranks_here) {
  check(o);
  world.set_timeout(Seconds(o.timeout));
  world.host().set_timeout(Seconds(o.timeout));
  const bool first = world.rank() == 0;
  const auto note = [&](const std::string& text) {
    if (!first) return;
    if (o.notes != nullptr) {
      *o.notes << text << std::endl;
    } else {
      log_warn("sample", text);
    }
  };
  std::optional<OpenedModel> opened;
  std::vector<PatternSpec> of_layers;
  CacheSettings cache;
  together(world, {"sample, opening the model"}, [&] {
    opened.emplace(o.run, o.root, o.step);
    if (opened->run()) bound_memory(opened->run()->memory);
    validate(opened->model());
    cache = {.context = o.context.value_or(opened->context()), .stored = cache_dtype(o.cache)};
    // A token has at least one byte, but for one at the beginning and one that a tokenizer may put before it.
    cache.positions = sum_up_to(cache.context, static_cast<int64_t>(o.prompt.size()) + 2, o.tokens);
    of_layers = generation_patterns(*opened, cache.context, note);
    cache.layout = prompt_layout(o.layout, opened->model(), of_layers, cache.context,
                                 {model_dtype(o.dtype, "--dtype"), /*gpu=*/false}, world.hosts());
    require_memory(o, opened->model(), of_layers, cache, world.size(), ranks_here);
  });
  std::unique_ptr<Alphabet> alphabet;  // of rank 0
  together(
      world, {"sample, reading the tokenizer"},
      [&] {
        if (!opened->run()) alphabet = ids_of_folder(o, opened->path());
      },
      /*only_first=*/true);
  const InferenceModel held(*opened, {.dtype = model_dtype(o.dtype, "--dtype"), .sharded = o.sharded}, world, "sample");
  bool from_nothing = false;
  const std::string encoded = from_first(world, {"sample, encoding the prompt"}, [&] {
    if (!alphabet) {
      alphabet = opened->tokens_are_ids() ? ids_of_run(o, opened->path()) : std::make_unique<Alphabet>();
    }
    std::vector<int64_t> ids = alphabet->encode(o.prompt);
    from_nothing = ids.empty();
    if (from_nothing && !interrupted()) ids.push_back(alphabet->beginning());
    for (const int64_t id : ids) {
      if (id < opened->model().vocab) continue;
      throw Error(ErrorKind::kInput, "sample",
                  "the tokenizer of " + opened->path() + " gives the id " + std::to_string(id) +
                      ", but the model has " + std::to_string(opened->model().vocab) +
                      " of them (vocab_size): they do not belong together");
    }
    return std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int64_t));
  });
  std::vector<int64_t> tokens(encoded.size() / sizeof(int64_t));
  std::memcpy(tokens.data(), encoded.data(), encoded.size());
  const auto prompt = static_cast<int64_t>(tokens.size());
  note_length(prompt, o.tokens, opened->context(), cache.context, note);
  cache.positions = sum_up_to(cache.context, prompt, o.tokens);
  std::optional<Generator> generator;
  together(world, {"sample, making the cache"}, [&] { generator.emplace(held.model(), of_layers, cache, world); });

  std::optional<Writer> writer;  // of rank 0
  if (first) writer.emplace(o);
  Decision next = decided(world, {"sample, the prompt"}, [&]() -> Decision {
    if (!from_nothing) {
      for (const int64_t id : tokens) writer->write(alphabet->bytes(id));
    }
    writer->flush();
    return {};
  });
  const Choice choice{.temperature = o.temperature, .top_k = o.top_k, .top_p = o.top_p, .seed = o.seed};
  int64_t choices = 0, near = 0;
  for (int64_t i = 0; i < o.tokens && !next.ends && !next.interrupted; ++i) {
    const at::Tensor logits = generator->feed(tokens);
    next = decided(world, {"sample, choosing a token", i + 1, "token"}, [&]() -> Decision {
      const Picked picked = pick(logits, alphabet->size(), choice, i, generator->rounding(logits));
      ++choices;
      near += picked.near;
      if (alphabet->ends(picked.token)) return {picked.token, /*ends=*/true};
      writer->write_generated(alphabet->bytes(picked.token));
      writer->flush();
      return {picked.token, writer->stopped()};
    });
    tokens.assign(1, next.token);
  }
  next = decided(world, {"sample, writing the text"}, [&]() -> Decision {
    writer->finish();
    return {};
  });
  if (near > 0 && world.size() > 1) {
    note(with_commas(near) + " of " + with_commas(choices, "choice") +
         " were between candidates that rounding may swap: another number of ranks may write another text");
  }
  return next.interrupted ? interrupt_exit_code() : 0;
}

}  // namespace annulus
