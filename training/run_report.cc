// See run_report.h.
#include "training/run_report.h"

#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "attention/plan/plan.h"
#include "memory/caches.h"

namespace annulus {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Of this process so far.
MetricsWriter::Table used_caches() {
  MetricsWriter::Table table;
  for (const CacheReport& cache : cache_reports()) {
    const CacheStats& s = cache.stats;
    if (s.hits + s.misses == 0) continue;
    table.push_back({cache.name,
                     {{"bytes", s.bytes},
                      {"entries", s.entries},
                      {"hits", s.hits},
                      {"misses", s.misses},
                      {"evictions", s.evictions},
                      {"too_large", s.too_large}}});
  }
  return table;
}

}  // namespace

RunReport::RunReport(const Settings& settings, Communicator& world, Training& training,
                     std::unique_ptr<MetricsWriter> metrics, Progress* progress)
    : settings_(settings),
      world_(world),
      training_(training),
      metrics_(std::move(metrics)),
      progress_(progress),
      begin_step_(training.steps_done()),
      interval_(clock()),
      begin_(interval_.time) {}

RunReport::Clock RunReport::clock() const {
  // What this rank has waited for others so far.
  const double waited = world_.stats().wait_seconds + training_.mesh().axis("context").stats().wait_seconds;
  return {now(), waited, plan_stats().seconds_on_path};
}

void RunReport::leave_out_since(const Clock& before) {
  const Clock after = clock();
  interval_.time += after.time - before.time;
  interval_.waited += after.waited - before.waited;
  interval_.planned += after.planned - before.planned;
}

double RunReport::seconds() const { return now() - begin_; }

std::optional<double> RunReport::utilization(double tokens_per_second) const {
  if (!settings_.peak_flops) return std::nullopt;
  return tokens_per_second * settings_.flops_per_token / *settings_.peak_flops;
}

void RunReport::step(const StepResult& result, bool validated) {
  ++interval_steps_;
  if (!metrics_) return;
  const int64_t step = training_.steps_done();
  const bool last = step == settings_.steps;
  const Clock here = clock();
  const double time = here.time;
  const double tokens = static_cast<double>(training_.tokens_per_step()) * static_cast<double>(interval_steps_);
  const double elapsed = time - interval_.time;
  const double speed = elapsed > 0 ? tokens / elapsed : 0;
  if (step % settings_.log_every == 0 || last || result.stop) {
    tokens_per_second_ = speed;
    // Hosts do not wait for transfers between GPUs, and nothing measures the devices' waits.
    const double exposed = settings_.on_gpu ? std::numeric_limits<double>::quiet_NaN() : here.waited - interval_.waited;
    MetricsWriter::Fields fields = {{"loss", result.loss},
                                    {"bits_per_byte", bits_per_byte(result.loss)},
                                    {"gradient_norm", result.gradient_norm},
                                    {"learning_rate", result.lr},
                                    {"tokens", step * training_.tokens_per_step()},
                                    {"tokens_per_second", speed},
                                    {"exposed_communication_seconds", exposed},
                                    {"exposed_planning_seconds", here.planned - interval_.planned},
                                    {"plans_made", plan_stats().programs_made},
                                    {"plan_cache_hits", plan_stats().programs.hits},
                                    {"caches", used_caches()},
                                    {"seconds", time - begin_}};
    if (const auto share = utilization(speed)) fields.emplace_back("model_flops_utilization", *share);
    metrics_->write(step, fields);
    interval_ = here;
    interval_steps_ = 0;
  }
  const double shown_speed = tokens_per_second_ > 0 ? tokens_per_second_ : speed;
  progress_->report({.step = step,
                     .steps = settings_.steps,
                     .loss = result.loss,
                     .validation_bits_per_byte = validation_,
                     .tokens_per_second = shown_speed,
                     .utilization = utilization(shown_speed),
                     .seconds_left = (time - begin_) / static_cast<double>(step - begin_step_) *
                                     static_cast<double>(settings_.steps - step)},
                    /*important=*/validated || last);
}

void RunReport::validation(double loss) {
  validation_ = bits_per_byte(loss);
  if (!metrics_) return;
  metrics_->write(training_.steps_done(), {{"validation_loss", loss}, {"validation_bits_per_byte", *validation_}});
}

}  // namespace annulus
