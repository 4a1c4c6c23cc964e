// RULER's tasks of counting words, "cwe" and "fwe". See task.h and task_text.h.
//
// cwe, common words: a list of words in a drawn order, numbered from 1. 10 words occur 30 times each, and all others 3
// times; in prompts of less than 4096 tokens 6 times and once. The size is the number of different words, at least 11.
// Up to 256 are single words, as RULER's are; larger lists have words with a hyphen alone (RULER: another list of
// English words). Asked for are the 10 common ones. Before it stands, with a line feed between, an example with its
// answer: 40 words, 10 and 3 times; in prompts of less than 4096 tokens 20 words, 3 times and once. The answer is a
// list, " 1. WORD
// 2. WORD ... 10. WORD". RULER's examples have it in an order that cannot be known; here it is that of the first
// occurrences, in the example and in what is asked.
//
// fwe, frequent words: words of 6 drawn letters, each as often as the zeta distribution with alpha = 2 says: the word
// of rank k occurs floor(n / (k^2 zeta(2))) times, where the size n is at least 53, so that the first five differ in
// that. There are (length - 50) / 50 ranks, but at least 5, and the word of the first is "...", which does not count.
// Words are shuffled, with spaces between. Asked for are those of ranks 2 to 4, and the answer is " " and these in this
// order, listed as "a, b, and c". RULER has 50 tokens for the answer; so has this.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <unordered_map>

#include "common/text.h"
#include "runtime/tasks/task_makers.h"
#include "runtime/tasks/task_text.h"
#include "runtime/tasks/word_list.h"

namespace annulus {
namespace {

constexpr size_t kCommonWords = 10;
constexpr int64_t kCommonDecoded = 120, kFrequentDecoded = 50;  // RULER's tokens_to_generate
constexpr int64_t kShortPrompts = 4096;
constexpr int64_t kLeastRanks = 5, kTokensOfRank = 50, kLeastFrequentSize = 53;
constexpr std::string_view kCommonTemplate =
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:";
constexpr std::string_view kFrequentTemplate =
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three "
    "most frequently appeared words in the above coded text? Answer: According to the coded text above, the three most "
    "frequently appeared words are:";

// " 1. a 2. b", with the space at its beginning.
std::string numbered(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) text += " " + std::to_string(i + 1) + ". " + words[i];
  return text;
}

std::vector<std::string> repeated(const std::vector<std::string>& words, const std::vector<int64_t>& counts,
                                  TaskDraws& draws) {
  std::vector<std::string> list;
  for (size_t i = 0; i < words.size(); ++i) list.insert(list.end(), static_cast<size_t>(counts[i]), words[i]);
  draws.shuffle(list);
  return list;
}

// Draws lists of different words: a longer one begins with the shorter ones, except that from 257 words on all have a
// hyphen.
class WordLists {
 public:
  explicit WordLists(TaskDraws draws) : draws_(draws) {
    for (const auto list : {adjectives(), nouns()}) single_.insert(single_.end(), list.begin(), list.end());
    draws_.shuffle(single_);
  }

  std::vector<std::string> first(int64_t count) {
    if (count <= std::ssize(single_)) return {single_.begin(), single_.begin() + count};
    while (std::ssize(joined_) < count) joined_.push_back(strings_.word(draws_));
    return {joined_.begin(), joined_.begin() + count};
  }

 private:
  TaskDraws draws_;
  DistinctStrings strings_;
  std::vector<std::string> single_, joined_;
};

TextPrompt common_text(const std::vector<std::string>& words, int64_t often, int64_t seldom, TaskDraws draws) {
  std::vector<int64_t> counts(words.size(), seldom);
  std::fill_n(counts.begin(), kCommonWords, often);
  const std::vector<std::string> list = repeated(words, counts, draws);
  std::unordered_map<std::string_view, int64_t> seen;
  std::vector<std::string> common;
  for (const std::string& word : list) {
    if (seen[word]++ == 0 &&
        std::find(words.begin(), words.begin() + kCommonWords, word) != words.begin() + kCommonWords) {
      common.push_back(word);
    }
  }
  return {filled(kCommonTemplate, {{"context", std::string_view(numbered(list)).substr(1)}}), numbered(common), common};
}

}  // namespace

TaskPrompt make_common(const TaskSettings& settings, const TaskDraws& draws, int64_t) {
  const bool is_short = settings.length < kShortPrompts;
  WordLists example_words(draws.stream(0)), words(draws.stream(1));
  const TextPrompt example = is_short ? common_text(example_words.first(20), 3, 1, draws.stream(2))
                                      : common_text(example_words.first(40), 10, 3, draws.stream(2));
  return fitted_prompt(settings, kCommonWords + 1, kCommonDecoded, [&](int64_t size) {
    TextPrompt text = common_text(words.first(size), is_short ? 6 : 30, is_short ? 1 : 3, draws.stream(3));
    text.prompt = example.prompt + example.answer + "\n" + text.prompt;
    return text;
  });
}

TaskPrompt make_frequent(const TaskSettings& settings, const TaskDraws& draws, int64_t) {
  const int64_t ranks = std::max(kLeastRanks, (settings.length - kFrequentDecoded) / kTokensOfRank);
  TaskDraws own = draws.stream(0);
  DistinctStrings strings;
  std::vector<std::string> words = {"..."};
  while (std::ssize(words) < ranks) words.push_back(strings.letters(own, 'a', 6));
  const std::vector<std::string> answers(words.begin() + 1, words.begin() + 4);
  return fitted_prompt(settings, kLeastFrequentSize, kFrequentDecoded, [&](int64_t size) {
    std::vector<int64_t> counts;
    for (int64_t k = 1; k <= ranks; ++k) {
      constexpr double kZeta = std::numbers::pi * std::numbers::pi / 6;
      counts.push_back(static_cast<int64_t>(static_cast<double>(size) / (static_cast<double>(k * k) * kZeta)));
    }
    TaskDraws order = draws.stream(1);
    const std::string context = join(repeated(words, counts, order), " ");
    return TextPrompt{filled(kFrequentTemplate, {{"context", context}}), " " + listed(answers), answers};
  });
}

}  // namespace annulus
