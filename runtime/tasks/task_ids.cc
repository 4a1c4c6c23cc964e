// The tasks on ids, for models without a tokenizer. See task.h.
//
// Prompts are made of symbols and of three markers:
//
//   vocab         symbols                          filler    separator  equals
//   128 to 512    97 ("a") to 122 ("z")            32 (" ")  59 (";")   61 ("=")
//   others        all ids from 3 on, below vocab   0         1          2
//
// With 128 to 512 ids the model is taken for one of bytes, so its prompts are lines of ASCII, and text of the same form
// is data to train it on. A vocabulary has at least 6 ids.
//
//   copy       = S, filler, = [S]. S is a string of 16 symbols, each drawn from all. The filler takes what is left of
//              the length, which is reached.
//   induction  x ... x a b x ... x a [b]. a is drawn from all symbols, and b and each x from the others, so a occurs
//              twice, and what followed the first is the answer. With n = length - 2 tokens before the last a, the
//              first is token round(depth (n - 2)). The length is reached.
//   kv         K V, K V, ... K [V], each pair followed by the pair separator: pairs, and the key of one of them again.
//              With 128 to 512 ids a pair is a word such as "qz42 ": a key of two symbols, a value of two ids from
//              48 ("0") to 57 ("9"), and the filler as its separator. Otherwise it is K equals V separator, where keys
//              and values are strings of k symbols, k being the least number that makes 16,384 different strings. Keys
//              differ; values are drawn from all. There are as many pairs as fit, but at most half of the different
//              keys (or, of words, 512) and at least 2; or as many as the settings say. If the length has room for more
//              than these n pairs, filler is spread before them evenly, F tokens altogether, so that the length is
//              reached: floor((i + 1) F / n) - floor(i F / n) before pair i. The pair that is asked for has the number
//              round(depth (n - 1)).
//
// In [] is the answer. Halves are rounded up.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/text.h"
#include "runtime/tasks/task_makers.h"

namespace annulus {
namespace {

constexpr int64_t kLeastVocab = 6;
constexpr int64_t kCopied = 16;           // symbols of a copied string
constexpr int64_t kLeastStrings = 16384;  // different keys that kv's keys are drawn from, but of words
constexpr int64_t kMostPairs = 8192;  // half of them, so that drawing a new one takes two attempts at most on average

constexpr int64_t kMostWords = 512;  // of 676 keys: four attempts
constexpr int64_t kFirstDigit = '0';
constexpr int64_t kDigits = 10;

// The ids that prompts consist of.
struct Alphabet {
  int64_t filler, separator, equals;
  int64_t first, count;  // the symbols
  bool bytes;            // the model is taken for one of bytes

  int64_t draw(TaskDraws& draws) const { return first + draws.below(count); }
  std::vector<int64_t> draw(TaskDraws& draws, int64_t length) const {
    std::vector<int64_t> string;
    for (int64_t i = 0; i < length; ++i) string.push_back(draw(draws));
    return string;
  }
};

Alphabet alphabet_of(const TaskSettings& settings) {
  if (settings.vocab >= 128 && settings.vocab <= 512) return {' ', ';', '=', 'a', 26, true};
  if (settings.vocab < kLeastVocab) {
    throw Error(ErrorKind::kUsage, "task",
                settings.name + " needs a vocabulary of at least " + std::to_string(kLeastVocab) + " ids, got " +
                    std::to_string(settings.vocab));
  }
  return {0, 1, 2, 3, settings.vocab - 3, false};
}

void append(std::vector<int64_t>& tokens, const std::vector<int64_t>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
}

TaskPrompt with_answer(std::vector<int64_t> prompt, const std::vector<int64_t>& answer) {
  const auto begin = static_cast<int64_t>(prompt.size());
  append(prompt, answer);
  return {std::move(prompt), begin, static_cast<int64_t>(answer.size()), {}};
}

}  // namespace

TaskPrompt make_copy(const TaskSettings& settings, const TaskDraws& own, int64_t) {
  TaskDraws draws = own;
  const Alphabet ids = alphabet_of(settings);
  constexpr int64_t kNeeded = 2 * (1 + kCopied);
  if (settings.length < kNeeded) refuse_length(settings, kNeeded);
  const std::vector<int64_t> string = ids.draw(draws, kCopied);
  std::vector<int64_t> prompt = {ids.equals};
  append(prompt, string);
  prompt.resize(static_cast<size_t>(settings.length - kCopied - 1), ids.filler);
  prompt.push_back(ids.equals);
  return with_answer(std::move(prompt), string);
}

TaskPrompt make_induction(const TaskSettings& settings, const TaskDraws& own, int64_t) {
  TaskDraws draws = own;
  const Alphabet ids = alphabet_of(settings);
  if (settings.length < 4) refuse_length(settings, 4);
  const int64_t body = settings.length - 2;
  const int64_t asked = ids.draw(draws);
  const auto other = [&] {
    const int64_t id = ids.first + draws.below(ids.count - 1);
    return id < asked ? id : id + 1;
  };
  std::vector<int64_t> prompt;
  for (int64_t i = 0; i < body; ++i) prompt.push_back(other());
  const auto place = static_cast<size_t>(std::llround(settings.depth * static_cast<double>(body - 2)));
  prompt[place] = asked;
  const int64_t answer = prompt[place + 1];
  prompt.push_back(asked);
  return with_answer(std::move(prompt), {answer});
}

TaskPrompt make_kv(const TaskSettings& settings, const TaskDraws& own, int64_t) {
  TaskDraws draws = own;
  const Alphabet ids = alphabet_of(settings);
  int64_t key_size = 1;
  for (int64_t strings = ids.count; strings < kLeastStrings; strings *= ids.count) ++key_size;
  if (ids.bytes) key_size = 2;
  const int64_t value_size = ids.bytes ? 2 : key_size;
  const int64_t most = ids.bytes ? kMostWords : kMostPairs;
  const int64_t question = key_size + (ids.bytes ? 0 : 1) + value_size;
  const int64_t pair = question + 1;
  if (settings.pairs != 0 && (settings.pairs < 2 || settings.pairs > most)) {
    throw Error(ErrorKind::kUsage, "task",
                "kv: expected 2 to " + with_commas(most) + " pairs, or 0 for as many as fit, got " +
                    with_commas(settings.pairs));
  }
  const int64_t needed = std::max<int64_t>(settings.pairs, 2) * pair + question;
  if (settings.length < needed) refuse_length(settings, needed);
  const int64_t fitting = (settings.length - question) / pair;
  const int64_t n = settings.pairs != 0 ? settings.pairs : std::min(fitting, most);
  // Less than a pair is left over, not filled: a form that training data has at any length.
  const int64_t filler = n == fitting ? 0 : settings.length - question - n * pair;

  const int64_t asked = std::llround(settings.depth * static_cast<double>(n - 1));
  std::set<std::vector<int64_t>> keys;
  std::vector<int64_t> prompt, asked_key, answer;
  const auto ask = [&](const std::vector<int64_t>& key) {
    append(prompt, key);
    if (!ids.bytes) prompt.push_back(ids.equals);
  };
  for (int64_t i = 0; i < n; ++i) {
    const int64_t here = (i + 1) * filler / n - i * filler / n;
    prompt.insert(prompt.end(), static_cast<size_t>(here), ids.filler);
    std::vector<int64_t> key = ids.draw(draws, key_size);
    while (!keys.insert(key).second) key = ids.draw(draws, key_size);
    std::vector<int64_t> value;
    for (int64_t j = 0; j < value_size; ++j) {
      value.push_back(ids.bytes ? kFirstDigit + draws.below(kDigits) : ids.draw(draws));
    }
    ask(key);
    append(prompt, value);
    prompt.push_back(ids.bytes ? ids.filler : ids.separator);
    if (i == asked) {
      asked_key = key;
      answer = value;
    }
  }
  ask(asked_key);
  return with_answer(std::move(prompt), answer);
}

}  // namespace annulus
