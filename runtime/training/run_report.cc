// See run_report.h.
#include "runtime/training/run_report.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "attention/proof/plans.h"
#include "common/logging/log.h"
#include "common/logging/log_setup.h"

namespace annulus {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Returns what each source has given so far.
MetricsWriter::Table given_by_sources(const Training& training) {
  MetricsWriter::Table table;
  const Dataset& data = training.data();
  for (size_t i = 0; i < data.sources(); ++i) {
    const SourceUse& use = training.uses()[i];
    table.push_back({data.name(i),
                     {{"rows", use.rows},
                      {"targets", use.targets},
                      {"documents", use.documents},
                      {"epochs", data.epochs(i, training.steps_done())}}});
  }
  return table;
}

}  // namespace

void tell(Progress* progress, LogLevel level, std::string_view text) {
  if (progress == nullptr || !log_enabled(level)) return;
  if (log_settings().json) {
    progress->finish();
    log(level, "train", text);
    return;
  }
  log_unshown(level, "train", text);
  progress->message(level == LogLevel::kWarn ? "warning: " + std::string(text) : std::string(text));
}

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
  // The wait times are those of the host on a CPU, and of the compute stream on a GPU.
  const CommStats& world = world_.stats();
  const CommStats& ring = training_.mesh().axis("context").stats();
  Clock clock{.time = now(),
              .waited = world.wait_seconds + ring.wait_seconds,
              .planned = plan_stats().seconds_on_path,
              .read = training_.waited_for_data(),
              .offload = training_.offloaded() ? training_.offloaded()->waited : 0,
              .ring = ring.wait_seconds};
  const ModelState& state = training_.model_state();
  for (const Communicator* comm : {state.sharers(), state.replicas()}) {
    if (comm == nullptr) continue;
    clock.waited += comm->stats().wait_seconds;
    clock.reduced += comm->stats().reduce_wait_seconds;
    clock.gathered += comm->stats().gather_wait_seconds;
  }
  return clock;
}

void RunReport::leave_out_since(const Clock& before) {
  const Clock after = clock();
  interval_.time += after.time - before.time;
  interval_.waited += after.waited - before.waited;
  interval_.planned += after.planned - before.planned;
  interval_.read += after.read - before.read;
  interval_.offload += after.offload - before.offload;
  interval_.ring += after.ring - before.ring;
  interval_.reduced += after.reduced - before.reduced;
  interval_.gathered += after.gathered - before.gathered;
}

void RunReport::add_changed(MetricsWriter::Fields& fields, std::string_view name, std::variant<int64_t, double> value,
                            bool all) {
  const auto [before, is_new] = written_.fields.try_emplace(name, value);
  if (!all && !is_new && before->second == value) return;
  before->second = value;
  std::visit([&](auto number) { fields.emplace_back(name, number); }, value);
}

MetricsWriter::Table RunReport::changed_caches(bool all) {
  MetricsWriter::Table table;
  for (const CacheReport& cache : cache_reports()) {
    const CacheStats& is = cache.stats;
    if (is.hits + is.misses == 0) continue;
    const auto [entry, is_new] = written_.caches.try_emplace(cache.name, is);
    CacheStats& before = entry->second;
    const bool same = is.bytes == before.bytes && is.entries == before.entries && is.misses == before.misses &&
                      is.evictions == before.evictions && is.too_large == before.too_large;
    if (!all && !is_new && same) continue;
    before = is;
    table.push_back({std::string(cache.name),
                     {{"bytes", is.bytes},
                      {"entries", is.entries},
                      {"hits", is.hits},
                      {"misses", is.misses},
                      {"evictions", is.evictions},
                      {"too_large", is.too_large}}});
  }
  return table;
}

double RunReport::seconds() const { return now() - begin_; }

std::optional<double> RunReport::utilization(double tokens_per_second) const {
  if (!settings_.peak_flops) return std::nullopt;
  return tokens_per_second * settings_.flops_per_token / *settings_.peak_flops;
}

void RunReport::step(const StepResult& result, bool validated) {
  interval_tokens_ += result.tokens;
  interval_targets_ += result.targets;
  if (!metrics_) return;
  const bool bytes = training_.data().is_text();
  const int64_t step = training_.steps_done();
  const bool last = step == settings_.steps;
  const Clock here = clock();
  const double time = here.time;
  const double elapsed = time - interval_.time;
  const double speed = elapsed > 0 ? static_cast<double>(interval_tokens_) / elapsed : 0;
  if (step % settings_.log_every == 0 || last || result.stop) {
    tokens_per_second_ = speed;
    MetricsWriter::Fields fields = {{"loss", result.loss}};
    if (bytes) fields.emplace_back("bits_per_byte", bits_per_byte(result.loss));
    const bool all = last || result.stop;  // the last line of this process holds every key
    fields.insert(fields.end(), {{"gradient_norm", result.gradient_norm},
                                 {"learning_rate", result.lr},
                                 {"tokens", training_.tokens_done()},
                                 {"tokens_per_second", speed}});
    add_changed(fields, "targets_share", static_cast<double>(interval_targets_) / static_cast<double>(interval_tokens_),
                all);
    const bool alone = world_.size() == 1;  // one rank waits for no other: these are 0 in every line
    const auto add_wait = [&](std::string_view name, double waited) {
      add_changed(fields, name, waited, all || !alone);
    };
    add_wait("exposed_communication_seconds", here.waited - interval_.waited);
    add_wait("exposed_ring_seconds", here.ring - interval_.ring);
    add_wait("exposed_reduce_seconds", here.reduced - interval_.reduced);
    add_wait("exposed_gather_seconds", here.gathered - interval_.gathered);
    fields.emplace_back("exposed_planning_seconds", here.planned - interval_.planned);
    fields.emplace_back("exposed_data_seconds", here.read - interval_.read);
    add_changed(fields, "plans_made", plan_stats().programs_made, all);
    fields.emplace_back("plan_cache_hits", plan_stats().programs.hits);
    fields.emplace_back("sources", given_by_sources(training_));
    if (MetricsWriter::Table caches = changed_caches(all); !caches.empty()) {
      fields.emplace_back("caches", std::move(caches));
    }
    fields.emplace_back("seconds", time - begin_);
    if (const auto offloaded = training_.offloaded()) {
      fields.emplace_back("exposed_offload_seconds", offloaded->waited - interval_.offload);
      fields.emplace_back("offloaded_bytes", offloaded->bytes_out);
    }
    if (settings_.spikes) {
      fields.emplace_back("gradient_norm_median", result.median.value_or(std::nan("")));
      fields.emplace_back("spikes_left_out", training_.spike_rule().spikes());
      fields.emplace_back("rows_left_out", training_.data().rows_left_out());
    }
    if (const auto share = utilization(speed)) fields.emplace_back("model_flops_utilization", *share);
    metrics_->write(step, fields);
    interval_ = here;
    interval_tokens_ = interval_targets_ = 0;
  }
  const double shown_speed = tokens_per_second_ > 0 ? tokens_per_second_ : speed;
  progress_->report({.step = step,
                     .steps = settings_.steps,
                     .loss = result.loss,
                     .validation_loss = validation_,
                     .of_bytes = bytes,
                     .tokens_per_second = shown_speed,
                     .utilization = utilization(shown_speed),
                     .seconds_left = (time - begin_) / static_cast<double>(step - begin_step_) *
                                     static_cast<double>(settings_.steps - step)},
                    /*important=*/validated || last);
}

void RunReport::rewound(int64_t from, const StepResult& spike) {
  begin_step_ = std::min(begin_step_, training_.steps_done());  // the newest checkpoint may have been damaged
  interval_ = clock();
  interval_tokens_ = interval_targets_ = 0;
  if (!metrics_) return;
  metrics_->remove_after(training_.steps_done());
  written_ = {};  // it may have stood in lines that are gone
  metrics_->write(training_.steps_done(), {{"rewound_from", from},
                                           {"gradient_norm", spike.gradient_norm},
                                           {"gradient_norm_median", spike.median.value_or(std::nan(""))},
                                           {"rows_left_out", training_.data().rows_left_out()}});
}

void RunReport::validation(const ValidationResult& result) {
  if (!std::isnan(result.loss)) validation_ = result.loss;  // NaN if nothing is held out
  if (!metrics_) return;
  const Dataset& data = training_.data();
  MetricsWriter::Fields fields = {{"validation_loss", result.loss}};
  if (data.is_text()) fields.emplace_back("validation_bits_per_byte", bits_per_byte(result.loss));
  MetricsWriter::Table sources;
  for (size_t i = 0; i < data.sources(); ++i) sources.push_back({data.name(i), {{"loss", result.of_source[i]}}});
  if (data.sources() > 1) fields.emplace_back("validation_sources", std::move(sources));
  MetricsWriter::Table tasks;
  for (const TaskResult& task : result.tasks)
    tasks.push_back({task.task, {{"exact", task.exact}, {"loss", task.loss}}});
  if (!tasks.empty()) fields.emplace_back("validation_tasks", std::move(tasks));
  metrics_->write(training_.steps_done(), fields);
}

}  // namespace annulus
