// RULER's variable tracking, "vt": one chain of 4 hops. See task.h and task_text.h.
//
//   VAR ABCDE = 12345       a number from 10000 to 99998, in a line of its own between lines of noise (five sentences)
//   VAR FGHIJ = VAR ABCDE   4 more such lines, each with a space at its end
//
// The lines stand, in the order of the chain, before lines of noise that are drawn without replacement. Names have five
// letters. Asked for are all variables that have the number, and the answer is " " and the names in the order of the
// chain, with spaces between. The prompt ends with a space already ("they are: "), and so has two, as RULER's example.
//
// The example that RULER puts before the prompt is such a prompt with its answer, and names of three letters. It has as
// many lines of noise as fit into 500 tokens, but at least 5, where RULER, with a tokenizer for which these are too
// many, ends in an endless loop.
#include <algorithm>
#include <array>

#include "common/text.h"
#include "runtime/tasks/task_makers.h"
#include "runtime/tasks/task_text.h"

namespace annulus {
namespace {

constexpr size_t kVariables = 5;          // of a chain
constexpr int64_t kTrackingDecoded = 30;  // RULER's tokens_to_generate
constexpr int64_t kExampleTokens = 500;
constexpr std::string_view kTracking =
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
    "variable "
    "assignment in the text above, {count} variables are assigned the value {query}, they are: ";

struct Chain {
  std::string value;
  std::vector<std::string> names, lines;
};

Chain drawn_chain(DistinctStrings& strings, TaskDraws& draws, int64_t letters) {
  Chain chain{strings.number(draws, 10000, 99998), {}, {}};
  for (size_t i = 0; i < kVariables; ++i) {
    chain.names.push_back(strings.letters(draws, 'A', letters));
    chain.lines.push_back("VAR " + chain.names[i] + " = " + (i == 0 ? chain.value : "VAR " + chain.names[i - 1] + " "));
  }
  return chain;
}

std::string tracking_text(const Chain& chain, int64_t size, TaskDraws draws) {
  std::vector<int64_t> places = draws.distinct(size, kVariables);
  std::sort(places.begin(), places.end());
  std::vector<std::string> lines;
  size_t next = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (next < kVariables && places[next] == i) lines.push_back(chain.lines[next++]);
    lines.emplace_back(kNoise);
  }
  return filled(kTracking,
                {{"context", join(lines, "\n")}, {"query", chain.value}, {"count", std::to_string(kVariables)}});
}

}  // namespace

TaskPrompt make_tracking(const TaskSettings& settings, const TaskDraws& draws, int64_t) {
  TaskDraws own = draws.stream(0);
  DistinctStrings strings;
  const Chain example_chain = drawn_chain(strings, own, 3), chain = drawn_chain(strings, own, 5);
  const auto answer = [](const Chain& c) { return " " + join(c.names, " "); };

  constexpr int64_t kLeast = kVariables;
  const auto example_text = [&](int64_t size) { return tracking_text(example_chain, size, draws.stream(1)); };
  const int64_t example_size = largest_size(kLeast, kExampleTokens, [&](int64_t size) {
    return static_cast<int64_t>(settings.encode(example_text(size)).size());
  });
  const std::string example = example_text(std::max(kLeast, example_size)) + answer(example_chain) + "\n\n";
  return fitted_prompt(settings, kLeast, kTrackingDecoded, [&](int64_t size) {
    return TextPrompt{example + tracking_text(chain, size, draws.stream(2)), answer(chain), chain.names};
  });
}

}  // namespace annulus
