// See task_text.h.
#include "runtime/tasks/task_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "common/error.h"
#include "runtime/tasks/task_makers.h"
#include "runtime/tasks/word_list.h"

namespace annulus {
namespace {

constexpr size_t kLongestSentence = 64;  // words

bool ends_sentence(std::string_view word) {
  static constexpr std::string_view kClosing[] = {"\"", "'", ")", "]", "}", "\xe2\x80\x99", "\xe2\x80\x9d", "\xc2\xbb"};
  for (bool again = true; again;) {
    again = false;
    for (const std::string_view mark : kClosing) {
      if (word.size() > mark.size() && word.ends_with(mark)) {
        word.remove_suffix(mark.size());
        again = true;
      }
    }
  }
  return word.ends_with('.') || word.ends_with('!') || word.ends_with('?');
}

std::vector<std::string> words_of(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  std::vector<std::string> words;
  for (size_t begin = text.find_first_not_of(kSpace); begin != std::string_view::npos;) {
    const size_t end = std::min(text.find_first_of(kSpace, begin), text.size());
    words.emplace_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(kSpace, end);
  }
  return words;
}

}  // namespace

Haystack::Haystack(const std::string& text) : words_(words_of(text.empty() ? kNoise : std::string_view(text))) {
  if (words_.empty()) {
    throw Error(ErrorKind::kInput, "task", "expected words in the haystack, got a text of white space alone");
  }
}

std::vector<std::string> Haystack::sentences_of_words(int64_t count) const {
  std::vector<std::string> sentences;
  size_t words = 0;  // of the last sentence, as long as it has not ended
  for (int64_t i = 0; i < count; ++i) {
    const std::string& word = words_[static_cast<size_t>(i) % words_.size()];
    if (words == 0) {
      sentences.push_back(word);
    } else {
      sentences.back() += " " + word;
    }
    words = ends_sentence(word) || words + 1 == kLongestSentence ? 0 : words + 1;
  }
  return sentences;
}

int64_t largest_size(int64_t least, int64_t most, const std::function<int64_t(int64_t size)>& tokens) {
  // Tokens grow almost in proportion to the size, so a few steps along the straight line through the last two points
  // find it. Every third step halves the interval instead, so that any function is done after a bounded number.
  int64_t low = least, low_tokens = tokens(low);
  if (low_tokens > most) return least - 1;
  int64_t high = 0, high_tokens = 0;  // 0: none is known yet that does not fit
  double slope = 0;
  for (int step = 0; high == 0 || low + 1 < high; ++step) {
    int64_t next = high == 0 ? 2 * low + 1 : low + (high - low) / 2;
    if (high != 0) slope = static_cast<double>(high_tokens - low_tokens) / static_cast<double>(high - low);
    if (slope > 0 && step % 3 != 2) {
      const double by_line = std::floor(static_cast<double>(most - low_tokens) / slope);
      const int64_t upper = high == 0 ? 64 * low + 64 : high - 1;
      next = by_line < static_cast<double>(upper - low) ? low + std::max<int64_t>(1, static_cast<int64_t>(by_line))
                                                        : upper;
    }
    const int64_t got = tokens(next);
    if (got > most) {
      high = next;
      high_tokens = got;
    } else {
      slope = static_cast<double>(got - low_tokens) / static_cast<double>(next - low);
      low = next;
      low_tokens = got;
    }
  }
  return low;
}

TaskPrompt fitted_prompt(const TaskSettings& settings, int64_t least, int64_t decoded, const MakeText& make) {
  const auto before = static_cast<int64_t>(settings.encode("").size());  // the id that a text begins with
  const auto spare = [&](const TextPrompt& text) {
    return std::max<int64_t>(0, decoded + before - static_cast<int64_t>(settings.encode(text.answer).size()));
  };
  const auto tokens = [&](int64_t size) {
    const TextPrompt text = make(size);
    return static_cast<int64_t>(settings.encode(text.prompt + text.answer).size()) + spare(text);
  };
  const int64_t size = largest_size(least, settings.length, tokens);
  if (size < least) refuse_length(settings, tokens(least));

  TextPrompt text = make(size);
  TaskPrompt result;
  result.tokens = settings.encode(text.prompt + text.answer);
  const std::vector<int64_t> alone = settings.encode(text.prompt);
  const auto differ = std::mismatch(alone.begin(), alone.end(), result.tokens.begin(), result.tokens.end()).second;
  if (differ == result.tokens.end()) {
    throw Error(ErrorKind::kInput, "task",
                settings.name + ": expected token ids for the answer \"" + text.answer +
                    "\", but the tokenizer gives the prompt the same ids with it as without it; use another tokenizer");
  }
  result.answer = differ - result.tokens.begin();
  result.room = static_cast<int64_t>(result.tokens.size()) - result.answer + spare(text);
  result.answers = std::move(text.answers);
  return result;
}

std::string listed(const std::vector<std::string>& parts) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) text += i + 1 == parts.size() ? ", and " : ", ";
    text += parts[i];
  }
  return text;
}

std::string filled(std::string_view text, const std::vector<std::pair<std::string_view, std::string_view>>& values) {
  std::string result;
  while (!text.empty()) {
    const auto found = std::find_if(values.begin(), values.end(), [&](const auto& value) {
      return text.starts_with('{') && text.substr(1).starts_with(value.first) &&
             text.substr(1 + value.first.size()).starts_with('}');
    });
    result += found == values.end() ? text.substr(0, 1) : found->second;
    text.remove_prefix(found == values.end() ? 1 : found->first.size() + 2);
  }
  return result;
}

std::string DistinctStrings::distinct(const std::function<std::string()>& draw) {
  while (true) {
    std::string text = draw();
    if (drawn_.insert(text).second) return text;
  }
}

std::string DistinctStrings::number(TaskDraws& draws, int64_t least, int64_t most) {
  return distinct([&] { return std::to_string(least + draws.below(most - least + 1)); });
}

std::string DistinctStrings::letters(TaskDraws& draws, char first, int64_t count) {
  return distinct([&] {
    std::string text;
    for (int64_t i = 0; i < count; ++i) text += static_cast<char>(first + draws.below(26));
    return text;
  });
}

std::string DistinctStrings::word(TaskDraws& draws) {
  // Half of the words of two parts, and then words of three, so that drawing a new one always ends.
  const auto drawn = [&](std::span<const std::string_view> list) {
    return std::string(list[static_cast<size_t>(draws.below(std::ssize(list)))]);
  };
  const bool two = words_++ < std::ssize(adjectives()) * std::ssize(nouns()) / 2;
  return distinct([&] {
    std::string text = drawn(adjectives());
    if (!two) text += "-" + drawn(adjectives());
    return text + "-" + drawn(nouns());
  });
}

std::string DistinctStrings::uuid(TaskDraws& draws) {
  return distinct([&] {
    constexpr char kDigits[] = "0123456789abcdef";
    const std::array<uint64_t, 2> bits = {draws.bits(), draws.bits()};
    std::string text;
    for (size_t i = 0; i < 32; ++i) {
      if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
      uint64_t digit = bits[i / 16] >> (60 - 4 * (i % 16)) & 15;
      if (i == 12) digit = 4;                // the version
      if (i == 16) digit = 8 | (digit & 3);  // the variant of RFC 9562
      text += kDigits[digit];
    }
    return text;
  });
}

}  // namespace annulus
