// What the tasks on text have in common: haystacks, a prompt as long as asked for, and strings that are drawn. Inside
// of this package only.
//
// RULER is C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", COLM 2024,
// arXiv:2404.06654. Its tasks are those of github.com/NVIDIA/RULER: scripts/synthetic.yaml has their settings, and
// scripts/data/synthetic/ the templates and how they are filled. Each file says what differs here. In all of them:
//
// - Random numbers are TaskDraws', so prompts are not RULER's own, but are drawn as RULER draws.
// - The haystack is as large as fits for each prompt, by bisection on its size. RULER bisects for one prompt and takes
//   that size, or less in coarse steps, for all.
// - RULER's words come from the Python package wonderwords; here they are those of word_list.h.
// - Paul Graham's essays are not included: an essay is the user's haystack, or without one RULER's noise sentences.
// - RULER's answers are sets of strings. To be scored by teacher forcing they need an order and separators, which each
//   file states.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "runtime/tasks/task.h"
#include "runtime/tasks/task_draws.h"

namespace annulus {

// RULER's haystack "noise".
inline constexpr std::string_view kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

// A text as words, which repeats without end. White space counts as one space.
//
// A sentence ends with a word that ends in ".", "!" or "?", perhaps with quotation marks or brackets behind it; a text
// without such words is cut after 64. (RULER takes NLTK's tokenizer, which also knows abbreviations.)
class Haystack {
 public:
  // The words of the user's text, or of kNoise if it is empty. Raises Error(kInput) for a text of white space alone.
  explicit Haystack(const std::string& text);

  // The sentences of the first `count` words.
  std::vector<std::string> sentences_of_words(int64_t count) const;
  // The sentences of the text, without repetition.
  std::vector<std::string> sentences() const { return sentences_of_words(static_cast<int64_t>(words_.size())); }

 private:
  std::vector<std::string> words_;
};

struct TextPrompt {
  std::string prompt, answer;  // the answer continues the prompt
  std::vector<std::string> answers;
};

// Makes the prompt whose haystack has a size. The same size gives the same prompt.
using MakeText = std::function<TextPrompt(int64_t size)>;

// The largest size from `least` on, at which a prompt has at most `most` tokens; `least - 1` if there is none. (A size
// that fits while the next larger one does not: tokens need not grow with every step.)
int64_t largest_size(int64_t least, int64_t most, const std::function<int64_t(int64_t size)>& tokens);

// The prompt with the largest haystack that fits, and its tokens. Room is left for the larger one of `decoded` tokens
// (RULER's tokens_to_generate) and the answer's, encoded by itself. Raises the error of refuse_length if the least
// haystack does not fit.
TaskPrompt fitted_prompt(const TaskSettings& settings, int64_t least, int64_t decoded, const MakeText& make);

// "a", "a, and b", "a, b, and c", as RULER's questions list what they ask for.
std::string listed(const std::vector<std::string>& parts);

// The text with each {name} replaced.
std::string filled(std::string_view text, const std::vector<std::pair<std::string_view, std::string_view>>& values);

// RULER's template of needles in a haystack. kind: "numbers", "words" or "uuids". `many` says whether several values
// are asked for. The prompt is ready for the values: it ends "... mentioned in the provided text is".
std::string niah_text(std::string_view kind, bool many, std::string_view context, std::string_view query);
// A needle: "One of the special magic numbers for KEY is: VALUE."
std::string niah_needle(std::string_view kind, std::string_view key, std::string_view value);

// Draws strings that all differ.
class DistinctStrings {
 public:
  std::string number(TaskDraws& draws, int64_t least, int64_t most);
  std::string letters(TaskDraws& draws, char first, int64_t count);  // of the 26 from "a" or "A" on
  std::string word(TaskDraws& draws);                                // "quiet-river": word_list.h
  std::string uuid(TaskDraws& draws);                                // version 4

 private:
  std::string distinct(const std::function<std::string()>& draw);

  std::unordered_set<std::string> drawn_;
  int64_t words_ = 0;
};

}  // namespace annulus
