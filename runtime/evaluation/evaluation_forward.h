// EvaluationJob::Forward: the loaded model of an evaluation on one rank. Internal to evaluation.cc and
// evaluation_tasks.cc.
#pragma once

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <chrono>
#include <ctime>
#include <string>

#include "common/interrupt.h"
#include "runtime/evaluation/evaluation.h"
#include "runtime/inference/inference_model.h"
#include "runtime/model/token_scores.h"

namespace annulus {

// A loaded model on this rank.
struct EvaluationJob::Forward {
  InferenceModel held;
  RowForward rows;
  RowChoices& choices;
  Communicator& world;
  double seconds = 0, cpu_seconds = 0;
  int64_t tokens = 0;

  Forward(OpenedModel& opened, const InferenceModel::Settings& settings, Communicator& comm, RowChoices& of,
          KernelKind kernel)
      : held(opened, settings, comm, "evaluate"), rows(held.model(), comm, kernel), choices(of), world(comm) {}

  // Collective: whether any rank was asked to stop.
  bool stopped(OpLabel label) const {
    at::Tensor stop = at::full({1}, interrupted() ? int64_t{1} : int64_t{0}, at::kLong);
    if (world.size() > 1) world.host().all_reduce(stop, ReduceOp::kMax, label);
    return stop.item<int64_t>() > 0;
  }

  // Adds what a computation takes to the costs.
  class Timed {
   public:
    explicit Timed(Forward& of) : of_(of), begin_(std::chrono::steady_clock::now()), cpu_(cpu_of_process()) {}
    ~Timed() {
      of_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
      of_.cpu_seconds += cpu_of_process() - cpu_;
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

   private:
    static double cpu_of_process() {
      timespec now{};
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
      return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    }

    Forward& of_;
    const std::chrono::steady_clock::time_point begin_;
    const double cpu_;
  };

  // `targets` are those of all positions. Collective.
  TokenScores score(const ForwardRows& of, const at::Tensor& targets, const std::string& label) {
    const c10::AutoGradMode no_grad(false);
    const Timed timed(*this);
    const LayerRequests& layers = choices.of({of.tokens.size(0), of.tokens.size(1), of.apart});
    const TokenScores scores = score_tokens(held.model(), rows.hidden(layers, of, label), targets,
                                            row_layout(layers, of), world.host(), label);
    tokens += of.tokens.numel();
    return scores;
  }
};

}  // namespace annulus
