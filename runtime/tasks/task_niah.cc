// RULER's tasks of needles in a haystack, "niah_...". See task.h and task_text.h.
//
//   task             haystack  keys    values   pairs of key and value       asked for
//   niah_single_1    noise     words   numbers  1                            1 key
//   niah_single_2    essay     words   numbers  1                            1 key
//   niah_single_3    essay     words   uuids    1                            1 key
//   niah_multikey_1  essay     words   numbers  4 keys                       1 key
//   niah_multikey_2  needles   words   numbers  1, and all of the haystack   1 key
//   niah_multikey_3  needles   uuids   uuids    1, and all of the haystack   1 key
//   niah_multivalue  essay     words   numbers  4 values of 1 key            1 key
//   niah_multiquery  essay     words   numbers  4 keys                       all 4 keys
//
// Numbers have 7 digits. A size of the haystack is that many lines of noise (five sentences), that many needles, a line
// each, or that many words of the essay, which may end within a sentence. Needles stand before lines that are drawn
// without replacement, or in essays behind floor(p n / 100) of n sentences, where the p are drawn without replacement
// from 40 numbers, 0 to 100 in even steps, rounded.
//
// Here all keys and values of a prompt differ, while RULER draws them with replacement. Needles of an essay are joined
// to sentences by one space; RULER puts another one where nothing stands between two needles. The answer is " " and the
// values, listed as the question lists keys ("a, b, and c"): those of several keys in the order of the question, those
// of one key in the order of the text.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "common/text.h"
#include "runtime/tasks/task_makers.h"
#include "runtime/tasks/task_text.h"

namespace annulus {
namespace {

constexpr int64_t kNiahDecoded = 128;  // RULER's tokens_to_generate
constexpr std::string_view kNiahContext =
    " hidden within the following text. Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
    "{context}\n";
constexpr std::string_view kNiahOne =
    "What is the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} for {query} "
    "mentioned in the provided text is";
constexpr std::string_view kNiahMany =
    "What are all the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} for "
    "{query} mentioned in the provided text are";

enum class Straw { kNoise, kEssay, kNeedles };

struct NiahTask {
  std::string_view name;
  Straw straw;
  std::string_view key_kind, value_kind;
  int keys, values, queries;
};

constexpr NiahTask kNiahTasks[] = {
    {"niah_single_1", Straw::kNoise, "words", "numbers", 1, 1, 1},
    {"niah_single_2", Straw::kEssay, "words", "numbers", 1, 1, 1},
    {"niah_single_3", Straw::kEssay, "words", "uuids", 1, 1, 1},
    {"niah_multikey_1", Straw::kEssay, "words", "numbers", 4, 1, 1},
    {"niah_multikey_2", Straw::kNeedles, "words", "numbers", 1, 1, 1},
    {"niah_multikey_3", Straw::kNeedles, "uuids", "uuids", 1, 1, 1},
    {"niah_multivalue", Straw::kEssay, "words", "numbers", 1, 4, 1},
    {"niah_multiquery", Straw::kEssay, "words", "numbers", 4, 1, 4},
};

struct Needle {
  int key;
  std::string value, text;
};

std::string drawn_string(std::string_view kind, DistinctStrings& strings, TaskDraws& draws) {
  if (kind == "words") return strings.word(draws);
  return kind == "uuids" ? strings.uuid(draws) : strings.number(draws, 1000000, 9999999);
}

// The items with needles before the items that have these numbers, ascending; the number of items is behind the last.
std::string joined(const std::vector<std::string>& items, const std::vector<int64_t>& places,
                   const std::vector<Needle>& needles, std::string_view between) {
  std::vector<std::string> all;
  size_t next = 0;
  for (size_t i = 0; i <= items.size(); ++i) {
    for (; next < places.size() && places[next] == static_cast<int64_t>(i); ++next) all.push_back(needles[next].text);
    if (i < items.size()) all.push_back(items[i]);
  }
  return join(all, between);
}

}  // namespace

std::string niah_text(std::string_view kind, bool many, std::string_view context, std::string_view query) {
  const std::string_view things = many ? kind : kind.substr(0, kind.size() - 1);
  const std::string form = std::string(many ? "Some special magic {kind} are" : "A special magic {kind} is") +
                           std::string(kNiahContext) + std::string(many ? kNiahMany : kNiahOne);
  return filled(form, {{"kind", things}, {"context", context}, {"query", query}});
}

std::string niah_needle(std::string_view kind, std::string_view key, std::string_view value) {
  return filled("One of the special magic {kind} for {key} is: {value}.",
                {{"kind", kind}, {"key", key}, {"value", value}});
}

TaskPrompt make_niah(const TaskSettings& settings, const TaskDraws& draws, int64_t) {
  const NiahTask& task = *std::ranges::find_if(kNiahTasks, [&](const NiahTask& t) { return t.name == settings.name; });
  TaskDraws own = draws.stream(0);
  DistinctStrings strings;
  std::vector<std::string> keys;
  std::vector<Needle> needles;
  for (int k = 0; k < task.keys; ++k) {
    keys.push_back(drawn_string(task.key_kind, strings, own));
    for (int v = 0; v < task.values; ++v) {
      const std::string value = drawn_string(task.value_kind, strings, own);
      needles.push_back({k, value, niah_needle(task.value_kind, keys.back(), value)});
    }
  }
  own.shuffle(needles);
  std::vector<std::string> queries, answers;
  for (const int64_t key : own.distinct(task.keys, task.queries)) {
    queries.push_back(keys[static_cast<size_t>(key)]);
    for (const Needle& needle : needles) {
      if (needle.key == key) answers.push_back(needle.value);
    }
  }

  const Haystack haystack(settings.haystack);
  std::vector<std::string> others;  // needles that make the haystack; as many as the largest size so far
  TaskDraws for_others = draws.stream(1);
  const auto context = [&](int64_t size) {
    TaskDraws for_places = draws.stream(2);
    if (task.straw == Straw::kEssay) {
      const std::vector<std::string> sentences = haystack.sentences_of_words(size);
      std::vector<int64_t> places;
      for (const int64_t i : for_places.distinct(40, std::ssize(needles))) {
        places.push_back(std::ssize(sentences) * std::llround(static_cast<double>(i) * 100 / 39) / 100);
      }
      std::ranges::sort(places);
      return joined(sentences, places, needles, " ");
    }
    while (task.straw == Straw::kNeedles && std::ssize(others) < size) {
      const std::string key = drawn_string(task.key_kind, strings, for_others);
      others.push_back(niah_needle(task.value_kind, key, drawn_string(task.value_kind, strings, for_others)));
    }
    const std::vector<std::string> lines =
        task.straw == Straw::kNoise ? std::vector<std::string>(static_cast<size_t>(size), std::string(kNoise))
                                    : std::vector<std::string>(others.begin(), others.begin() + size);
    std::vector<int64_t> places = for_places.distinct(size, std::ssize(needles));
    std::ranges::sort(places);
    return joined(lines, places, needles, "\n");
  };
  return fitted_prompt(settings, 1, kNiahDecoded, [&](int64_t size) {
    const bool many = answers.size() > 1;
    return TextPrompt{niah_text(task.value_kind, many, context(size), listed(queries)), " " + listed(answers), answers};
  });
}

}  // namespace annulus
