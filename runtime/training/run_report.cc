// See run_report.h.
#include "runtime/training/run_report.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "attention/proof/plans.h"
#include "comm/link_probe.h"
#include "common/clock.h"
#include "common/logging/log.h"
#include "common/logging/log_setup.h"
#include "common/version.h"

namespace annulus {
namespace {

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

// Returns the rows of those reports that have been used: of all, or of those of which what `counts` is not as it was
// last written.
template <typename Reports, typename Stats, typename Used, typename Counts, typename Row>
MetricsWriter::Table changed(const Reports& reports, std::map<std::string_view, Stats>& written, bool all,
                             const Used& used, const Counts& counts, const Row& row) {
  MetricsWriter::Table table;
  for (const auto& report : reports) {
    const Stats& is = report.stats;
    if (!used(is)) continue;
    const auto [entry, is_new] = written.try_emplace(report.name, is);
    if (!all && !is_new && counts(is) == counts(entry->second)) continue;
    entry->second = is;
    table.push_back({std::string(report.name), row(is)});
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

RunReport::RunReport(const Config& config, const RunStart& start, Communicator& world, Training& training,
                     std::unique_ptr<MetricsWriter> metrics, Progress* progress)
    : config_(config),
      start_(start),
      flops_per_token_(start.peak_flops ? training.flops_per_token() : 0),
      world_(world),
      training_(training),
      metrics_(std::move(metrics)),
      progress_(progress),
      begin_(steady_seconds()),
      left_out_(TrainingClock::now(world, training)),
      ranks_(config, world, training, start.device),
      begin_step_(training.steps_done()) {
  left_out_ = TrainingClock::now(world, training);
  write_start();
}

// A line that cannot be written ends the run, as a checkpoint does (checkpoint.on_error), or is left out. That is said
// once until lines are written again.
void RunReport::write(int64_t step, const MetricsWriter::Fields& fields) {
  try {
    metrics_->write(step, fields);
    lines_lost_ = false;
  } catch (const Error& error) {
    if (config_.checkpoint.on_error != "continue") throw;
    written_ = {};  // it may have stood in this line
    if (std::exchange(lines_lost_, true)) return;
    tell(progress_, LogLevel::kWarn,
         "lines of metrics are lost: " + std::string(error.message()) + "; the run goes on");
  }
}

void RunReport::write_start() {
  if (!metrics_) return;
  MetricsWriter::Facts facts = {{"time", time_text(std::chrono::system_clock::now()).substr(0, 19) + "Z"},
                                {"version", std::string(kVersion)},
                                {"ranks", int64_t{world_.size()}},
                                {"hosts", int64_t{world_.hosts().count()}},
                                {"host", ranks_.hosts()[0]},
                                {"device", start_.device_text},
                                {"kernel", start_.kernel},
                                {"mesh", training_.mesh().text()},
                                {"model_parameters", training_.model().parameters().count()}};
  if (start_.peak_flops) facts.emplace_back("peak_flops", *start_.peak_flops);
  facts.emplace_back("resumed", start_.resumed);
  const MemoryKinds& memory = start_.memory;
  write(begin_step_, {{"started", std::move(facts)},
                      {"memory_plan", MetricsWriter::Facts{{"weights", memory.weights},
                                                           {"gradients", memory.gradients},
                                                           {"optimizer", memory.optimizer},
                                                           {"activations", memory.activations},
                                                           {"working", memory.working},
                                                           {"total", memory.total()}}}});
}

void RunReport::sample() {
  sampled_ = clock();
  carried_ = ranks_.sample(sampled_);
}

std::function<Training::Carried()> RunReport::carry() {
  return [this] {
    if (start_.device.is_cpu()) sample();
    return carried_;
  };
}

void RunReport::add_changed(MetricsWriter::Fields& fields, std::string_view name, std::variant<int64_t, double> value,
                            bool all) {
  const auto [before, is_new] = written_.fields.try_emplace(name, value);
  if (!all && !is_new && before->second == value) return;
  before->second = value;
  std::visit([&](auto number) { fields.emplace_back(name, number); }, value);
}

MetricsWriter::Table RunReport::changed_caches(bool all) {
  return changed(
      cache_reports(), written_.caches, all, [](const CacheStats& is) { return is.hits + is.misses > 0; },
      [](const CacheStats& is) { return std::tie(is.bytes, is.entries, is.misses, is.evictions, is.too_large); },
      [](const CacheStats& is) -> MetricsWriter::Numbers {
        return {{"bytes", is.bytes},   {"entries", is.entries},     {"hits", is.hits},
                {"misses", is.misses}, {"evictions", is.evictions}, {"too_large", is.too_large}};
      });
}

MetricsWriter::Table RunReport::changed_pool(bool all) {
  return changed(
      Pool::process().reports(), written_.pool, all, [](const PoolStats& is) { return is.taken + is.reused > 0; },
      [](const PoolStats& is) { return std::tie(is.taken, is.peak, is.cached); },
      [](const PoolStats& is) -> MetricsWriter::Numbers {
        return {{"in_use", is.in_use}, {"cached", is.cached}, {"peak", is.peak}, {"fragmentation", is.fragmentation()},
                {"taken", is.taken},   {"reused", is.reused}};
      });
}

double RunReport::seconds() const { return steady_seconds() - begin_; }

std::optional<double> RunReport::utilization(double tokens_per_second) const {
  if (!start_.peak_flops) return std::nullopt;
  return tokens_per_second * flops_per_token_ / *start_.peak_flops;
}

void RunReport::step(const StepResult& result, bool validated) {
  interval_tokens_ += result.tokens;
  interval_targets_ += result.targets;
  if (start_.device.is_cuda()) sample();
  const TrainingClock here = clock();
  std::vector<double> links;
  if (RankMetrics::asks_for_probe(result.carried)) {
    const Pause pause(*this);
    links = probe_links(world_);
  }
  if (!metrics_) return;
  const bool bytes = training_.data().is_text();
  const int64_t step = training_.steps_done();
  const int64_t steps = config_.run.steps;
  const bool last = step == steps;
  std::vector<SlowRank> changes = ranks_.step(step, result.carried);
  if (!links.empty()) {
    for (SlowRank& slow : ranks_.probed(links)) changes.push_back(std::move(slow));
  }
  for (const SlowRank& rank : changes) {
    tell(progress_, rank.change.slow ? LogLevel::kWarn : LogLevel::kInfo, rank.text);
    write(step, rank.fields());
  }
  const double seconds_done = seconds();
  const double elapsed = here.time - interval_.time;
  const double speed = elapsed > 0 ? static_cast<double>(interval_tokens_) / elapsed : 0;
  const bool logged = step % config_.run.log_every == 0 || last || result.stop;
  if (logged) {
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
    if (MetricsWriter::Table pool = changed_pool(all); !pool.empty()) fields.emplace_back("pool", std::move(pool));
    fields.emplace_back("seconds", seconds_done);
    if (const auto offloaded = training_.offloaded()) {
      fields.emplace_back("exposed_offload_seconds", here.offload - interval_.offload);
      fields.emplace_back("offloaded_bytes", offloaded->bytes_out);
    }
    if (config_.optimizer.spike > 0) {
      fields.emplace_back("gradient_norm_median", result.median.value_or(std::nan("")));
      fields.emplace_back("spikes_left_out", training_.spike_rule().spikes());
      fields.emplace_back("rows_left_out", training_.data().rows_left_out());
    }
    if (const auto share = utilization(speed)) fields.emplace_back("model_flops_utilization", *share);
    ranks_.add_fields(fields);
    write(step, fields);
    interval_ = here;
    interval_tokens_ = interval_targets_ = 0;
  }
  const double shown_speed = tokens_per_second_ > 0 ? tokens_per_second_ : speed;
  progress_->report(
      {.step = step,
       .steps = steps,
       .loss = result.loss,
       .validation_loss = validation_,
       .of_bytes = bytes,
       .tokens_per_second = shown_speed,
       .utilization = utilization(shown_speed),
       .seconds_left = seconds_done / static_cast<double>(step - begin_step_) * static_cast<double>(steps - step)},
      validated || last ? Progress::Stays::kImportant
      : logged          ? Progress::Stays::kLogged
                        : Progress::Stays::kNo);
}

void RunReport::rewound(int64_t from, const StepResult& spike) {
  const bool before = training_.steps_done() < begin_step_;  // the newest checkpoint was damaged
  begin_step_ = std::min(begin_step_, training_.steps_done());
  left_out_ += clock() - sampled_;
  interval_ = clock();
  ranks_.forget(spike.carried);
  interval_tokens_ = interval_targets_ = 0;
  if (!metrics_) return;
  metrics_->remove_after(training_.steps_done());
  written_ = {};  // it may have stood in lines that are gone
  write(training_.steps_done(), {{"rewound_from", from},
                                 {"gradient_norm", spike.gradient_norm},
                                 {"gradient_norm_median", spike.median.value_or(std::nan(""))},
                                 {"rows_left_out", training_.data().rows_left_out()}});
  if (before) write_start();
}

void RunReport::checkpoint(const SavedCheckpoint& saved) {
  if (!metrics_) return;
  write(saved.step, {{"checkpoint", saved.folder.substr(saved.folder.rfind('/') + 1)},
                     {"checkpoint_stopped_seconds", saved.stopped},
                     {"checkpoint_seconds", saved.seconds}});
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
  write(training_.steps_done(), fields);
}

}  // namespace annulus
