// The tasks of an evaluation. See evaluation.h.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "runtime/data/read_row.h"
#include "runtime/data/shards/tokenization.h"
#include "runtime/evaluation/evaluation_forward.h"
#include "runtime/huggingface/byte_tokenizer.h"
#include "runtime/huggingface/text_ids.h"
#include "runtime/inference/generator.h"
#include "runtime/tasks/task.h"

namespace annulus {
namespace {

// The most bytes of a haystack.
constexpr size_t kMostHaystack = size_t{1} << 30;

// Whether a folder in Hugging Face's layout has a tokenizer.
bool holds_tokenizer(const std::string& folder) {
  return is_file(folder + "/tokenizer.json") || is_file(folder + "/tokenizer.model");
}

void refuse_if_interrupted() {
  if (interrupted()) throw Error(ErrorKind::kResource, "evaluate", "it was asked to stop while it made prompts");
}

// What of an answer a decoded one has: for tasks on text, the share of the strings that it contains; for tasks on ids,
// 1 if it is the answer.
double share_decoded(const TaskPrompt& prompt, const std::vector<int64_t>& ids,
                     const std::optional<TokenTable>& table) {
  if (prompt.answers.empty()) {
    const std::vector<int64_t> answer(prompt.tokens.begin() + prompt.answer, prompt.tokens.end());
    return ids.size() >= answer.size() && std::equal(answer.begin(), answer.end(), ids.begin()) ? 1 : 0;
  }
  std::string text;
  for (const int64_t id : ids) {
    if (!table) {
      text += static_cast<char>(id);
    } else if (id < table->size() && !table->hidden(id)) {
      text += table->bytes(id);
    }
  }
  return share_found(prompt.answers, text);
}

}  // namespace

std::vector<PatternSpec> EvaluationJob::decoding_patterns(int64_t length) const {
  if (!options_.attention.pattern.empty()) return {parse_pattern(options_.attention.pattern, "--pattern")};
  return generation_patterns(opened_, length, [](const std::string& text) { log_warn_once_per_job("evaluate", text); });
}

std::vector<int64_t> EvaluationJob::decode(Forward& forward, const std::vector<int64_t>& prompt, int64_t room,
                                           int64_t length, const Decoder& decoder, EvaluationResults& results) const {
  const Forward::Timed timed(forward);
  CacheSettings cache{.context = length, .positions = length};
  std::optional<Generator> generator;
  together(forward.world, {"evaluate, making the cache"}, [&] {
    const std::vector<PatternSpec> patterns = decoding_patterns(length);
    const Parameters& computed = forward.held.model().parameters();
    cache.layout = prompt_layout(options_.attention.layout, opened_.model(), patterns, length,
                                 {computed.dtype(), computed.device().is_cuda()}, forward.world.hosts());
    generator.emplace(forward.held.model(), patterns, cache, forward.world);
  });
  const int64_t limit = decoder.table ? decoder.table->size() : opened_.tokens_are_ids() ? opened_.model().vocab : 256;
  std::vector<int64_t> ids, tokens = prompt;
  for (bool ended = false; !ended && static_cast<int64_t>(ids.size()) < room;) {
    const at::Tensor logits = generator->feed(tokens);
    const Picked picked =
        pick(logits, std::min(limit, opened_.model().vocab), {.temperature = 0}, 0, generator->rounding(logits));
    // All ranks go on with the choice of rank 0, whose logits another processor may round otherwise.
    const bool ends = std::find(decoder.ends.begin(), decoder.ends.end(), picked.token) != decoder.ends.end();
    at::Tensor token = at::tensor({picked.token, static_cast<int64_t>(ends)}, at::kLong);
    if (forward.world.size() > 1) forward.world.host().broadcast(token, 0, {"evaluate, the next token"});
    results.near_ties += picked.near ? 1 : 0;
    ids.push_back(token[0].item<int64_t>());
    ended = token[1].item<int64_t>() != 0;
    tokens.assign(1, ids.back());
  }
  forward.tokens += static_cast<int64_t>(prompt.size() + ids.size());
  return ids;
}

EvaluationJob::Decoder EvaluationJob::decoder() const {
  Decoder decoder;
  if (opened_.run()) {
    if (!opened_.tokens_are_ids()) return decoder;
    const std::string folder = opened_.tokenizer_folder();
    decoder.table = TokenTable::load(folder + "/tokens.table");
    const std::shared_ptr<const Tokenization> made = Tokenizations().of_folder(folder);
    if (made && made->end) decoder.ends.push_back(*made->end);
    return decoder;
  }
  if (!options_.make_table) {
    throw Error(ErrorKind::kUnavailable, "evaluate", "this program has no tokenizer (annulus evaluate has one)");
  }
  const std::string path = options_.make_table(opened_.path());
  const std::unique_ptr<const std::string, void (*)(const std::string*)> remove(
      &path, [](const std::string* file) { ::unlink(file->c_str()); });
  refuse_if_interrupted();
  decoder.table = TokenTable::load(path);
  decoder.ends = read_text_ids(opened_.path()).ends;
  return decoder;
}

void EvaluationJob::evaluate_cell(Forward& forward, const Cell& cell, const TaskSettings& settings,
                                  const Decoder& decoder, EvaluationResults& results) const {
  const std::string label = "evaluate, " + cell.task + " of " + counted(cell.length, "token");
  TaskCell result;
  result.task = cell.task;
  result.length = cell.length;
  result.depth = cell.depth;
  const int64_t at_once = rows_at_once(cell.length);
  double found = 0;
  for (int64_t first = 0; first < options_.trials; first += at_once) {
    results.stopped = results.stopped || forward.stopped({label + ", asking whether to stop"});
    if (results.stopped) break;
    const int64_t count = std::min(at_once, options_.trials - first);
    std::vector<TaskPrompt> prompts;  // of rank 0
    // Of each prompt: where its answer begins, room for it, the length, the tokens.
    const std::string sent = from_first(forward.world, {label + ", making prompts"}, [&] {
      std::vector<int64_t> numbers;
      for (int64_t i = 0; i < count; ++i) {
        prompts.push_back(make_prompt(settings, first + i));
        const TaskPrompt& prompt = prompts.back();
        numbers.push_back(prompt.answer);
        numbers.push_back(prompt.room);
        numbers.push_back(static_cast<int64_t>(prompt.tokens.size()));
        for (const int64_t id : prompt.tokens) {
          if (id < opened_.model().vocab) continue;
          throw Error(ErrorKind::kInput, "evaluate",
                      "a prompt of " + cell.task + " has the id " + std::to_string(id) +
                          ", but the model's vocabulary has " + std::to_string(opened_.model().vocab) +
                          ": the tokenizer is not the model's");
        }
        numbers.insert(numbers.end(), prompt.tokens.begin(), prompt.tokens.end());
      }
      return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
    });
    std::vector<int64_t> numbers(sent.size() / sizeof(int64_t));
    std::memcpy(numbers.data(), sent.data(), sent.size());
    const ForwardRows of{.tokens = at::zeros({count, cell.length}, at::kLong)};
    const at::Tensor targets = at::full({count, cell.length}, kNoTarget, at::kLong);
    const int64_t* at = numbers.data();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t answer = at[0], size = at[2];
      int64_t* row = of.tokens[i].data_ptr<int64_t>();
      std::copy_n(at + 3, size - 1, row);  // the last token predicts nothing
      std::copy_n(at + 3 + answer, size - answer, targets[i].data_ptr<int64_t>() + answer - 1);
      at += 3 + size;
    }
    const TokenScores scores = forward.score(of, targets, label);
    at = numbers.data();
    int64_t answered = options_.generate ? 0 : count;
    for (; answered < count && !results.stopped; ++answered) {
      const std::vector<int64_t> ids = decode(forward, {at + 3, at + 3 + at[0]}, at[1], cell.length, decoder, results);
      if (forward.world.rank() == 0) found += share_decoded(prompts[static_cast<size_t>(answered)], ids, decoder.table);
      at += 3 + at[2];
      results.stopped = forward.stopped({label + ", asking whether to stop"});
    }
    if (!scores.nats.defined()) continue;
    for (int64_t i = 0; i < answered; ++i) {
      const at::Tensor counted = targets[i].ge(0);
      const int64_t tokens = counted.sum().item<int64_t>();
      const int64_t right = scores.first[i].logical_and(counted).sum().item<int64_t>();
      ++result.trials;
      result.exact += right == tokens ? 1 : 0;
      result.tokens += tokens;
      result.right += right;
      result.nats += scores.nats[i].sum().item<double>();
    }
  }
  if (forward.world.rank() != 0 || result.trials == 0) return;
  if (options_.generate) result.generated = found / static_cast<double>(result.trials);
  results.cells.push_back(result);
}

// What the prompts of all cells share.
TaskSettings EvaluationJob::task_settings() const {
  TaskSettings settings;
  settings.vocab = opened_.model().vocab;
  settings.seed = options_.seed;
  settings.pairs = options_.pairs;
  settings.needles = options_.needles;
  if (!options_.haystack.empty()) settings.haystack = read_small_file("evaluate", options_.haystack, kMostHaystack);
  const auto is_text = [](const Cell& cell) { return is_text_task(cell.task); };
  if (std::ranges::any_of(cells_, is_text)) {
    // After an interruption a tokenizer gives no ids, of which no prompt could be made.
    settings.encode = [encode = text_encoder()](const std::string& text) {
      std::vector<int64_t> ids = encode(text);
      refuse_if_interrupted();
      return ids;
    };
  }
  return settings;
}

TaskSettings EvaluationJob::settings_of(const Cell& cell, TaskSettings settings) {
  settings.name = cell.task;
  settings.length = cell.length;
  settings.depth = cell.depth.value_or(0.5);
  return settings;
}

// The encoder of the model's text.
EvaluationOptions::Encode EvaluationJob::text_encoder() const {
  if (opened_.run() && !opened_.tokens_are_ids()) return byte_ids;
  if (!options_.tokenizer) {
    throw Error(ErrorKind::kUnavailable, "evaluate", "this program has no tokenizer (annulus evaluate has one)");
  }
  if (opened_.run()) return options_.tokenizer(opened_.tokenizer_folder());
  const EvaluationOptions::Encode encode = options_.tokenizer(opened_.path());
  // sentencepiece adds no begin token by itself, although Llama 2 and Mistral were trained with one.
  const std::optional<int64_t> begin = read_text_ids(opened_.path()).begin;
  if (is_file(opened_.path() + "/tokenizer.json") || !begin) return encode;
  return [encode, begin](const std::string& text) {
    std::vector<int64_t> ids = encode(text);
    if (ids.empty() || ids[0] != *begin) ids.insert(ids.begin(), *begin);
    return ids;
  };
}

// Raises Error(kInput) if the data are of another tokenizer than the model's.
void EvaluationJob::require_tokens_of_the_model() const {
  if (!data_) return;
  const bool bytes = opened_.run() ? !opened_.tokens_are_ids() : is_byte_tokenizer(opened_.path() + "/tokenizer.json");
  for (size_t source = 0; source < data_->sources(); ++source) {
    const Corpus& corpus = data_->corpus(source);
    const auto refuse = [&](const std::string& message) {
      throw Error(ErrorKind::kInput, "evaluate", data_->name(source) + ": " + message);
    };
    if (corpus.is_text() && !bytes && (opened_.run() || holds_tokenizer(opened_.path()))) {
      refuse(
          "it is text, whose tokens would be bytes, but the model's are ids of a tokenizer: make shards of it "
          "(annulus tokenize)");
    }
    if (!opened_.run() || bytes || corpus.tokenizer().empty()) continue;
    const std::string table = opened_.tokenizer_folder() + "/tokens.table";
    if (is_file(table) && TokenTable::load(table).tokenizer() != corpus.tokenizer()) {
      refuse("it was made with the tokenizer " + corpus.tokenizer() + ", but the model was trained with another");
    }
  }
}

}  // namespace annulus
