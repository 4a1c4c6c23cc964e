// The tasks of `annulus evaluate --task`: prompts whose answers a model can only give if it uses keys that lie far
// back. evaluation.cc scores them; the files task_*.cc make them, and define them. Making prompts needs no model and no
// LibTorch, is a function of the task's settings alone, and is the same on every rank. Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// What a task is made from. Errors of a task are Error(kUsage) for settings, and Error(kInput) for texts.
struct TaskSettings {
  std::string name;  // one of task_names()
  // Tokens of a prompt with room for its answer. Never exceeded, and reached up to what a task adds at once.
  int64_t length = 0;
  double depth = 0.5;   // where what is asked for lies in the prompt: 0 at its beginning, 1 at its end
  int64_t vocab = 256;  // for tasks on ids: the ids that may occur
  uint64_t seed = 1;
  // For tasks on text: its ids. It may put an id before the text, and must put none behind it.
  std::function<std::vector<int64_t>(const std::string&)> encode{};
  std::string haystack{};              // text in which needles are hidden; empty: RULER's five sentences, repeated
  std::vector<std::string> needles{};  // for "needle": sentences with one {key} before one {value}; empty: RULER's
  int64_t pairs = 0;                   // for "kv": how many; 0: as many as fit
};

struct TaskPrompt {
  std::vector<int64_t> tokens;  // the prompt, and then the answer that is scored
  int64_t answer = 0;           // the index in `tokens` of the answer's first token
  int64_t room = 0;             // tokens that a decoded answer may have: as many as the scored one at least
  // For tasks on text: the strings that a decoded answer must contain, by RULER's metric string_match_all.
  std::vector<std::string> answers;
};

// The names of all tasks: "copy", "induction", "kv" on ids (defined in task_ids.cc); on text "needle" (task_needle.cc)
// and RULER's: "niah_single_1", ... (task_niah.cc), "vt" (task_tracking.cc), "cwe" and "fwe" (task_words.cc). Where
// names are given, "ruler" stands for all of RULER's.
const std::vector<std::string>& task_names();
// The tasks that a name stands for, in RULER's order. Raises Error(kUsage), with the nearest name, for an unknown one.
std::vector<std::string> tasks_of(std::string_view name);
// Whether a task asks for something that lies at a depth; if not, `depth` is ignored.
bool has_depth(std::string_view task);
// Whether a task is made of text, and so needs `encode`.
bool is_text_task(std::string_view task);

// The ids of a text for a model whose tokens are bytes.
std::vector<int64_t> byte_ids(const std::string& text);

// Prompt `sample` of a task (0, 1, ...), a function of the settings and this number.
//
// The answer of a task on text is a text that continues the prompt, and its tokens are those of both together: where
// the ids of prompt and answer, encoded at once, first differ from the ids of the prompt alone, the answer begins. So
// if the tokenizer merges the end of the prompt with the beginning of the answer, the merged token is scored, too.
TaskPrompt make_prompt(const TaskSettings& settings, int64_t sample);

// What of a decoded text is right: the share of `answers` (TaskPrompt) that it contains, whatever the case of its
// letters, as RULER's string_match_all counts. There must be one answer at least.
double share_found(const std::vector<std::string>& answers, const std::string& text);

}  // namespace annulus
