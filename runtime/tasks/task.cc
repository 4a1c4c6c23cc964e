// See task.h.
#include "runtime/tasks/task.h"

#include <algorithm>

#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "runtime/tasks/task_makers.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_task(const std::string& message) { throw Error(ErrorKind::kUsage, "task", message); }

struct TaskKind {
  const char* name;
  bool text, ruler, depth;
  TaskPrompt (*make)(const TaskSettings&, const TaskDraws&, int64_t sample);
};

constexpr TaskKind kTasks[] = {
    {"copy", false, false, false, make_copy},
    {"induction", false, false, true, make_induction},
    {"kv", false, false, true, make_kv},
    {"needle", true, false, true, make_needle},
    {"niah_single_1", true, true, false, make_niah},
    {"niah_single_2", true, true, false, make_niah},
    {"niah_single_3", true, true, false, make_niah},
    {"niah_multikey_1", true, true, false, make_niah},
    {"niah_multikey_2", true, true, false, make_niah},
    {"niah_multikey_3", true, true, false, make_niah},
    {"niah_multivalue", true, true, false, make_niah},
    {"niah_multiquery", true, true, false, make_niah},
    {"vt", true, true, false, make_tracking},
    {"cwe", true, true, false, make_common},
    {"fwe", true, true, false, make_frequent},
};
constexpr const char* kRuler = "ruler";

const TaskKind& kind_of(std::string_view name) {
  const auto it = std::find_if(std::begin(kTasks), std::end(kTasks), [&](const TaskKind& t) { return t.name == name; });
  if (it != std::end(kTasks)) return *it;
  std::vector<std::string> known = task_names();
  known.push_back(kRuler);
  refuse_task("unknown task \"" + std::string(name) + "\"" + suggestion(name, known));
}

}  // namespace

const std::vector<std::string>& task_names() {
  static const std::vector<std::string> names = names_of(kTasks);
  return names;
}

std::vector<std::string> tasks_of(std::string_view name) {
  if (name != kRuler) return {kind_of(name).name};
  std::vector<std::string> all;
  for (const TaskKind& task : kTasks) {
    if (task.ruler) all.emplace_back(task.name);
  }
  return all;
}

bool has_depth(std::string_view task) { return kind_of(task).depth; }
bool is_text_task(std::string_view task) { return kind_of(task).text; }

void refuse_length(const TaskSettings& settings, int64_t needed) {
  refuse_task(settings.name + " needs at least " + with_commas(needed, "token") + " here, got a length of " +
              with_commas(settings.length) + "; give a greater length");
}

std::vector<int64_t> byte_ids(const std::string& text) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  return {bytes, bytes + text.size()};
}

TaskPrompt make_prompt(const TaskSettings& settings, int64_t sample) {
  const TaskKind& kind = kind_of(settings.name);
  if (kind.depth && !(settings.depth >= 0 && settings.depth <= 1)) {
    refuse_task(settings.name + ": expected a depth from 0 (the beginning) to 1 (the end), got " +
                exact(settings.depth));
  }
  if (kind.text && !settings.encode) {
    refuse_task(settings.name +
                " is made of text, and needs a tokenizer, but the model has none; tasks on token ids are "
                "copy, induction and kv");
  }
  return kind.make(settings, TaskDraws(settings.seed, settings.name, sample), sample);
}

double share_found(const std::vector<std::string>& answers, const std::string& text) {
  const std::string in = lower_case(text);
  const auto holds = [&](const std::string& answer) { return in.find(lower_case(answer)) != std::string::npos; };
  return static_cast<double>(std::count_if(answers.begin(), answers.end(), holds)) /
         static_cast<double>(answers.size());
}

}  // namespace annulus
