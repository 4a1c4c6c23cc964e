// The tasks of a validation (validation.tasks). See training.h.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention/plan/layout.h"
#include "common/error.h"
#include "runtime/model/token_scores.h"
#include "runtime/tasks/task.h"
#include "runtime/training/training.h"
#include "runtime/training/training_share.h"

namespace annulus {
namespace {

// Prompt `trial` of the `trials` of a task in rows of this length. Tasks on text are for data of bytes.
TaskPrompt prompt_of(const std::string& task, const Config& config, int64_t length, int64_t trial) {
  const auto trials = static_cast<double>(config.validation.trials);
  TaskSettings settings{.name = task, .length = length, .depth = (static_cast<double>(trial) + 0.5) / trials};
  settings.vocab = config.model.vocab;
  settings.encode = byte_ids;
  return make_prompt(settings, trial);
}

}  // namespace

void Training::require_tasks() const {
  for (const std::string& named : config_.validation.tasks) {
    for (const std::string& task : tasks_of(named)) {
      if (is_text_task(task) && !data_.is_text()) {
        throw Error(
            ErrorKind::kUsage, "train",
            "validation.tasks has " + task +
                ", which is text, but the tokens of the data are ids of a tokenizer: annulus evaluate can run it");
      }
      for (const Stage& stage : stages_) {
        try {
          // Prompts differ in the least length that they need.
          for (int64_t trial = 0; trial < config_.validation.trials; ++trial) {
            prompt_of(task, config_, stage.context, trial);
          }
        } catch (const Error& error) {
          throw Error(error.kind(), "train",
                      "validation.tasks, in rows of data.context = " + std::to_string(stage.context) + ": " +
                          std::string(error.message()));
        }
      }
    }
  }
}

TaskResult Training::answer(const std::string& task, const std::function<bool()>& stop, bool& stopped) {
  const c10::AutoGradMode no_grad(false);
  const BatchShape& shape = share_->shape;
  const Stage& now = stages_[stage_];
  const int64_t trials = config_.validation.trials;
  const Layout layout = query_layout(share_->requests[0]);
  Communicator& ring = mesh_.axis("context");
  const at::Tensor positions = at::tensor(layout.positions(ring.rank()), at::kLong);
  double exact = 0, answered = 0, nats = 0, tokens = 0;
  for (int64_t first = 0; first < trials; first += now.batch) {
    const at::Tensor rows = at::full({shape.own_rows, now.context}, 0, at::kLong);
    const at::Tensor targets = at::full({shape.own_rows, now.context}, kNoTarget, at::kLong);
    for (int64_t row = 0; row < shape.own_rows; ++row) {
      const int64_t trial = first + shape.first_row + row;
      if (trial >= trials) break;
      const TaskPrompt prompt = prompt_of(task, config_, now.context, trial);
      const auto size = static_cast<int64_t>(prompt.tokens.size());
      std::copy_n(prompt.tokens.begin(), size - 1, rows[row].data_ptr<int64_t>());  // the last predicts nothing
      std::copy_n(prompt.tokens.begin() + prompt.answer, size - prompt.answer,
                  targets[row].data_ptr<int64_t>() + prompt.answer - 1);
    }
    const std::string when = "validation, " + task;
    const std::vector<PlannedCall> calls_now = calls(share_->requests, {}, when);
    plan(calls_now, {"agreeing on the attention of a task"});
    model_state_.begin_forward();
    const at::Tensor own = rows.index_select(1, positions).to(device_);
    const at::Tensor hidden = model_.hidden(own, model_.rotary(positions), attend(calls_now));
    const TokenScores scores = score_tokens(model_, hidden, targets, layout, ring.host(), when);
    std::vector<double> sums = {0, 0, 0, 0, stop() ? 1.0 : 0.0};
    for (int64_t row = 0; scores.nats.defined() && row < shape.own_rows; ++row) {
      const at::Tensor counted = targets[row].ge(0);
      const int64_t of_answer = counted.sum().item<int64_t>();
      if (of_answer == 0) continue;
      sums[0] += scores.first[row].logical_and(counted).sum().item<int64_t>() == of_answer ? 1 : 0;
      sums[1] += 1;
      sums[2] += scores.nats[row].sum().item<double>();
      sums[3] += static_cast<double>(of_answer);
    }
    at::Tensor all = at::tensor(sums, at::kDouble);
    Communicator& host = mesh_.world().host();
    if (host.size() > 1) host.all_reduce(all, ReduceOp::kSum, {"the results of a task"});
    exact += all[0].item<double>();
    answered += all[1].item<double>();
    nats += all[2].item<double>();
    tokens += all[3].item<double>();
    stopped = all[4].item<double>() > 0;
    if (stopped) return {};
  }
  return {task, exact / answered, nats / tokens};
}

}  // namespace annulus
