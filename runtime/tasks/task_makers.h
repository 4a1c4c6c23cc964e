// The functions that make the prompts of single tasks, which make_prompt (task.cc) calls after it has checked what all
// tasks need. Inside of this package only.
#pragma once

#include <cstdint>

#include "runtime/tasks/task.h"
#include "runtime/tasks/task_draws.h"

namespace annulus {

// Tasks on ids: task_ids.cc.
TaskPrompt make_copy(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);
TaskPrompt make_induction(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);
TaskPrompt make_kv(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);

// Tasks on text.
TaskPrompt make_needle(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);    // task_needle.cc
TaskPrompt make_niah(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);      // task_niah.cc
TaskPrompt make_tracking(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);  // task_tracking.cc
TaskPrompt make_common(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);    // task_words.cc
TaskPrompt make_frequent(const TaskSettings& settings, const TaskDraws& draws, int64_t sample);  // task_words.cc

// Raises the error for a length that is less than `needed`.
[[noreturn]] void refuse_length(const TaskSettings& settings, int64_t needed);

}  // namespace annulus
