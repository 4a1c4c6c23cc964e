// The task "needle": one sentence with a value in a haystack, at any depth and length (G. Kamradt's "Needle in a
// Haystack"). See task.h and task_text.h.
//
//   haystack  sentences of the user's text, or of RULER's noise, from one that is drawn on; after the last comes the
//             first again. They are joined by spaces. As many as fit.
//   needle    the user's sentences in turn, by the prompt's number, or RULER's "One of the special magic numbers for
//             {key} is: {value}." The key is a word ("quiet-river"), the value a number of 7 digits.
//   depth     the needle stands at the end of the sentence, or at the beginning of the haystack, that is nearest to
//             depth times the bytes of the haystack.
//   question  with RULER's needle, RULER's template for one number. With the user's, these lines, which end with the
//             needle up to its value:
//
//               A fact is hidden within the following text. Make sure to memorize it. I will quiz you about it
//               afterwards. HAYSTACK What does the text above say about KEY? NEEDLE UP TO ITS VALUE
//
//   answer    the value, with the spaces before it.
//
// Room is left for 32 tokens of an answer, so that a decoded one need not begin with the value.
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/text.h"
#include "runtime/tasks/task_makers.h"
#include "runtime/tasks/task_text.h"

namespace annulus {
namespace {

constexpr int64_t kNeedleRoom = 32;
constexpr std::string_view kKey = "{key}", kValue = "{value}";
constexpr std::string_view kUsersTemplate =
    "A fact is hidden within the following text. Make sure to memorize it. I will quiz you about it afterwards.\n"
    "{context}\nWhat does the text above say about {key}? {beginning}";

bool occurs_once(std::string_view text, std::string_view part) {
  const size_t at = text.find(part);
  return at != std::string_view::npos && text.find(part, at + 1) == std::string_view::npos;
}

void check_needle(const std::string& needle) {
  if (occurs_once(needle, kKey) && occurs_once(needle, kValue) && needle.find(kKey) < needle.find(kValue)) return;
  throw Error(ErrorKind::kInput, "task",
              "needle \"" + printable(needle, 200) +
                  "\": expected a sentence with one {key}, and one {value} after it, as in \"The code of {key} is "
                  "{value}.\"");
}

// The haystack: `count` sentences from `first` on, with the needle at the depth.
std::string with_needle(const std::vector<std::string>& sentences, size_t first, int64_t count, double depth,
                        const std::string& needle) {
  const auto sentence = [&](int64_t i) -> const std::string& {
    return sentences[(first + static_cast<size_t>(i)) % sentences.size()];
  };
  int64_t bytes = 0;  // a sentence counts with the space behind it
  for (int64_t i = 0; i < count; ++i) bytes += std::ssize(sentence(i)) + 1;
  const double wanted = depth * static_cast<double>(bytes);
  int64_t before = 0, place = 0;
  for (int64_t i = 0, at = 0; i < count; ++i) {
    at += std::ssize(sentence(i)) + 1;
    if (std::abs(static_cast<double>(at) - wanted) < std::abs(static_cast<double>(before) - wanted)) {
      before = at;
      place = i + 1;
    }
  }
  std::string text;
  for (int64_t i = 0; i <= count; ++i) {
    if (i == place) text += (text.empty() ? "" : " ") + needle;
    if (i < count) text += (text.empty() ? "" : " ") + sentence(i);
  }
  return text;
}

}  // namespace

TaskPrompt make_needle(const TaskSettings& settings, const TaskDraws& draws, int64_t sample) {
  for (const std::string& needle : settings.needles) check_needle(needle);
  const std::vector<std::string> sentences = Haystack(settings.haystack).sentences();
  TaskDraws own = draws.stream(0);
  const auto first = static_cast<size_t>(own.below(std::ssize(sentences)));
  DistinctStrings strings;
  const std::string key = strings.word(own), value = strings.number(own, 1000000, 9999999);

  std::string needle, beginning;
  if (settings.needles.empty()) {
    needle = niah_needle("numbers", key, value);
  } else {
    const std::string& form = settings.needles[static_cast<size_t>(sample) % settings.needles.size()];
    needle = filled(form, {{"key", key}, {"value", value}});
    beginning = filled(std::string_view(form).substr(0, form.find(kValue)), {{"key", key}});
  }
  // The spaces before the value belong to the answer, because most tokenizers merge them with what follows.
  const size_t end = beginning.find_last_not_of(' ') + 1;
  const std::string answer = (settings.needles.empty() ? " " : beginning.substr(end)) + value;
  beginning.resize(end);

  return fitted_prompt(settings, 1, kNeedleRoom, [&](int64_t size) {
    const std::string context = with_needle(sentences, first, size, settings.depth, needle);
    const std::string prompt =
        settings.needles.empty()
            ? niah_text("numbers", false, context, key)
            : filled(kUsersTemplate, {{"context", context}, {"key", key}, {"beginning", beginning}});
    return TextPrompt{prompt, answer, {value}};
  });
}

}  // namespace annulus
