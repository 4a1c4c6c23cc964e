// See rank_metrics.h.
#include "runtime/training/rank_metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "attention/proof/plans.h"
#include "comm/hosts.h"
#include "common/clock.h"
#include "common/text.h"
#include "memory/caches.h"
#include "memory/device_memory.h"
#include "memory/pool/pool.h"
#include "runtime/model/model_shape.h"
#include "runtime/run/meters.h"

namespace annulus {
namespace {

using Carried = Training::Carried;

// The numbers that a rank contributes. The first are sums since its first step.
enum Number : size_t {
  kCompute,
  kCommunication,
  kRing,
  kReduce,
  kGather,
  kOffload,
  kPlanning,
  kData,
  kTokens,
  kAttention,  // FLOPs; NaN if they are not known
  kMemory,
  kCaches,
  kInPool,
  kPoolFree,
  kHeldWeights,
  kHeldGradients,
  kHeldOptimizer,
  kHeldActivations,
  kMhz,
  kProbe,  // of rank 0: 1 if the links are to be measured after this step
  kNumbers,
};
static_assert(kNumbers == std::tuple_size_v<Carried>);

struct Measure {
  std::string_view name;
  Number number;
  bool sum = true;     // of which a line has the part since the line before
  bool whole = false;  // written without a fraction
};
constexpr Measure kMeasures[] = {{"compute_seconds", kCompute},
                                 {"exposed_communication_seconds", kCommunication},
                                 {"exposed_ring_seconds", kRing},
                                 {"exposed_reduce_seconds", kReduce},
                                 {"exposed_gather_seconds", kGather},
                                 {"exposed_offload_seconds", kOffload},
                                 {"exposed_planning_seconds", kPlanning},
                                 {"exposed_data_seconds", kData},
                                 {"tokens", kTokens, true, true},
                                 {"memory_bytes", kMemory, false, true},
                                 {"caches_bytes", kCaches, false, true},
                                 {"pool_bytes", kInPool, false, true},
                                 {"pool_cached_bytes", kPoolFree, false, true},
                                 {"weights_bytes", kHeldWeights, false, true},
                                 {"gradients_bytes", kHeldGradients, false, true},
                                 {"optimizer_bytes", kHeldOptimizer, false, true},
                                 {"activations_bytes", kHeldActivations, false, true},
                                 {"clock_mhz", kMhz, false}};

// A line has the seconds of each rank up to this many.
constexpr size_t kListed = 64;
// So many probes in a row must name a link.
constexpr int kProbes = 3;
// What is waited for below this share of the time is not worth a word.
constexpr double kWorthAWord = 0.01;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

std::variant<int64_t, double> number(double value, bool whole) {
  if (whole && std::isfinite(value)) return static_cast<int64_t>(std::llround(value));
  return value;
}

std::string percent(double share) { return rounded(100 * share, 0) + " %"; }

// Seconds that the rank did not wait for others.
double own(const Carried& numbers) {
  return numbers[kCompute] + numbers[kOffload] + numbers[kPlanning] + numbers[kData];
}

Carried difference(const Carried& now, const Carried& before) {
  Carried difference = now;
  for (size_t i = 0; i < kMemory; ++i) difference[i] -= before[i];
  return difference;
}

constexpr double TrainingClock::*kClockParts[] = {
    &TrainingClock::time,     &TrainingClock::waited,  &TrainingClock::ring, &TrainingClock::reduced,
    &TrainingClock::gathered, &TrainingClock::planned, &TrainingClock::read, &TrainingClock::offload};

}  // namespace

TrainingClock TrainingClock::now(const Communicator& world, Training& training) {
  const CommStats& all = world.stats();
  const CommStats& ring = training.mesh().axis("context").stats();
  TrainingClock clock{.time = steady_seconds(),
                      .waited = all.wait_seconds + ring.wait_seconds,
                      .ring = ring.wait_seconds,
                      .planned = plan_stats().seconds_on_path,
                      .read = training.waited_for_data(),
                      .offload = training.offloaded() ? training.offloaded()->waited : 0};
  const ModelState& state = training.model_state();
  for (const Communicator* comm : {state.sharers(), state.replicas()}) {
    if (comm == nullptr) continue;
    clock.waited += comm->stats().wait_seconds;
    clock.reduced += comm->stats().reduce_wait_seconds;
    clock.gathered += comm->stats().gather_wait_seconds;
  }
  return clock;
}

TrainingClock& TrainingClock::operator+=(const TrainingClock& other) {
  for (const auto part : kClockParts) this->*part += other.*part;
  return *this;
}

TrainingClock operator-(TrainingClock a, const TrainingClock& b) {
  for (const auto part : kClockParts) a.*part -= b.*part;
  return a;
}

MetricsWriter::Fields SlowRank::fields() const {
  const int64_t rank = change.rank;
  MetricsWriter::Fields fields;
  if (change.slow) {
    fields = {{"slow_rank", rank}, {"slow_host", host}, {"slow_share", change.excess}, {"slow_since", change.since}};
  } else {
    fields = {{"slow_rank_over", rank}};
  }
  if (link_to) fields.emplace_back("slow_link_to", int64_t{*link_to});
  if (!waited_for.empty()) fields.emplace_back("slow_waited_for", waited_for);
  return fields;
}

RankMetrics::RankMetrics(const Config& config, Communicator& world, Training& training, at::Device device)
    : training_(training),
      device_(device),
      hosts_(world.size() > 1 ? all_gather_text(world, host_name(), {"naming the hosts"})
                              : std::vector<std::string>{host_name()}),
      flops_per_token_(flops_per_token(training.model().shape(), 0)),
      stragglers_({config.run.slow_share, config.run.slow_steps}),
      window_(config.run.slow_share > 0 ? static_cast<size_t>(config.run.slow_steps) : 1),
      share_(device.is_cuda() || world.size() == 1 ? 0 : config.run.slow_share),
      seconds_(config.run.slow_seconds / static_cast<double>(config.run.slow_steps)),
      now_(static_cast<size_t>(world.size()), Carried{}),
      written_(now_) {
  last_.push_back(written_);
  for (int rank = 0; rank < world.size(); ++rank) host_of_.push_back(world.hosts().of(rank));
}

Carried RankMetrics::sample(const TrainingClock& clock) {
  if (asked_at_ < 0 || clock.time - asked_at_ >= 1) {
    asked_at_ = clock.time;
    memory_ = device_.is_cuda() ? device_memory(device_).allocated : resident_bytes();
    mhz_ = device_.is_cuda() ? gpu_mhz(gpu_bus_id(device_)) : processor_mhz();
    caches_ = 0;
    for (const CacheReport& cache : cache_reports()) {
      if (cache.on_device || !device_.is_cuda()) caches_ += cache.stats.bytes;
    }
    pool_ = pool_cached_ = 0;
    if (device_.is_cpu()) {
      for (const PoolReport& purpose : Pool::process().reports()) {
        pool_ += purpose.stats.in_use, pool_cached_ += purpose.stats.cached;
      }
    }
    held_ = training_.held();
  }
  const TrainingWork& work = training_.own_work();
  const double attention = work.pairs * (flops_per_token(training_.model().shape(), 1) - flops_per_token_);
  Carried numbers{};
  numbers[kCompute] = clock.compute();
  numbers[kCommunication] = clock.waited;
  numbers[kRing] = clock.ring;
  numbers[kReduce] = clock.reduced;
  numbers[kGather] = clock.gathered;
  numbers[kOffload] = clock.offload;
  numbers[kPlanning] = clock.planned;
  numbers[kData] = clock.read;
  numbers[kTokens] = static_cast<double>(work.tokens);
  numbers[kAttention] = attention;
  numbers[kMemory] = static_cast<double>(memory_);
  numbers[kCaches] = static_cast<double>(caches_);
  numbers[kInPool] = static_cast<double>(pool_);
  numbers[kPoolFree] = static_cast<double>(pool_cached_);
  numbers[kHeldWeights] = static_cast<double>(held_.weights);
  numbers[kHeldGradients] = static_cast<double>(held_.gradients);
  numbers[kHeldOptimizer] = static_cast<double>(held_.optimizer);
  numbers[kHeldActivations] = static_cast<double>(held_.activations);
  numbers[kMhz] = mhz_;
  numbers[kProbe] = std::exchange(asks_, false) ? 1 : 0;
  return numbers;
}

std::vector<SlowRank> RankMetrics::step(int64_t step, std::vector<Carried> of_ranks) {
  now_ = std::move(of_ranks);
  if (first_ < 0) first_ = step;
  std::vector<RankStep> ranks;
  double longest = 0;
  for (size_t i = 0; i < now_.size(); ++i) {
    const Carried of_step = difference(now_[i], last_.back()[i]);
    longest = std::max(longest, own(of_step) + of_step[kCommunication]);
    // A rank whose attention is not known until it runs may have more to do than the others.
    const bool known = !std::isnan(of_step[kAttention]);
    ranks.push_back({.seconds = known ? own(of_step) : 0,
                     .tokens = of_step[kTokens] * flops_per_token_,
                     .attention = known ? of_step[kAttention] : 0});
  }
  if (longest < seconds_) return {};
  last_.push_back(now_);
  if (last_.size() > window_ + 1) last_.pop_front();
  begins_.push_back(first_);
  if (begins_.size() > window_) begins_.pop_front();
  std::vector<SlowRank> slow;
  for (const Stragglers::Change& change : stragglers_.add(std::exchange(first_, -1), ranks))
    slow.push_back(describe(change));
  for (SlowRank& over : look_at_links()) slow.push_back(std::move(over));
  return slow;
}

bool RankMetrics::asks_for_probe(const std::vector<Carried>& of_ranks) { return of_ranks[0][kProbe] > 0; }

std::vector<SlowRank> RankMetrics::look_at_links() {
  if (!(share_ > 0) || last_.size() <= window_) return {};
  double least = 1;
  for (size_t i = 0; i < last_.back().size(); ++i) {
    const Carried numbers = difference(last_.back()[i], last_.front()[i]);
    const double all = own(numbers) + numbers[kCommunication];
    least = std::min(least, all > 0 ? numbers[kCommunication] / all : 0);
  }
  if (!all_wait_ && least > share_ && !stragglers_.any_slow()) {
    all_wait_ = asks_ = true;
    wait_since_ = begins_.front();
  }
  if (!all_wait_ || least >= share_ / 2) return {};
  all_wait_ = asks_ = false;
  if (std::exchange(said_, 0) < kProbes) return {};
  const auto from = static_cast<int>(*link_);
  return {
      {{.rank = from, .slow = false},
       hosts_[*link_],
       /*waited_for=*/"",
       "the link from rank " + std::to_string(from) + " on " + hosts_[*link_] + " keeps the ranks waiting no longer",
       next_rank(*link_)}};
}

std::vector<SlowRank> RankMetrics::probed(const std::vector<double>& links) {
  if (!all_wait_) return {};
  const std::optional<size_t> link = slow_link(links, host_of_);
  if (!link) return said_ = 0, std::vector<SlowRank>();
  said_ = link == link_ ? said_ + 1 : 1;
  link_ = link;
  asks_ = said_ < kProbes;
  if (asks_) return {};
  const size_t from = *link;
  const int to = next_rank(from);
  std::vector<double> waits;
  for (size_t i = 0; i < last_.back().size(); ++i) {
    const Carried numbers = difference(last_.back()[i], last_.front()[i]);
    waits.push_back(numbers[kCommunication] / (own(numbers) + numbers[kCommunication]));
  }
  const std::string next = "rank " + std::to_string(to) + " on " + hosts_[static_cast<size_t>(to)];
  return {{{.rank = static_cast<int>(from), .slow = true, .excess = median(waits), .since = wait_since_},
           hosts_[from],
           /*waited_for=*/"",
           "the link from rank " + std::to_string(from) + " on " + hosts_[from] + " to " + next +
               " is slow: a message takes " + rounded(1e3 * links[from], 1) + " ms there, " +
               rounded(1e3 * median(links), 1) + " ms in the median of all links; the ranks wait " +
               percent(median(waits)) + " of their time for each other since step " + with_commas(wait_since_),
           to}};
}

SlowRank RankMetrics::describe(const Stragglers::Change& change) const {
  const auto rank = static_cast<size_t>(change.rank);
  SlowRank slow{change, hosts_[rank], /*waited_for=*/"", /*text=*/""};
  const std::string who = "rank " + std::to_string(rank) + " on " + slow.host;
  if (!change.slow) {
    slow.text = who + " is no longer slower than the others";
    return slow;
  }
  const auto in_window = [&](size_t i) { return difference(last_.back()[i], last_.front()[i]); };
  const Carried numbers = in_window(rank);
  const double seconds = own(numbers) + numbers[kCommunication];
  std::vector<std::pair<double, std::string_view>> waits = {
      {numbers[kData], "data"},
      {numbers[kPlanning], "plans"},
      {numbers[kOffload], "what is offloaded"},
      {numbers[kRing], "keys and values"},
      {numbers[kReduce], "sums of gradients"},
      {numbers[kGather], "weights"},
      {numbers[kCommunication] - numbers[kRing] - numbers[kReduce] - numbers[kGather], "the end of steps"}};
  std::sort(waits.begin(), waits.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [waited, what] : waits) {
    if (!(waited >= kWorthAWord * seconds)) break;
    slow.waited_for += (slow.waited_for.empty() ? "" : ", ") + std::string(what) + " " + percent(waited / seconds);
  }
  if (slow.waited_for.empty()) slow.waited_for = "nothing";
  std::vector<double> compute, all, others;
  for (size_t i = 0; i < last_.back().size(); ++i) {
    if (i == rank) continue;
    const Carried other = in_window(i);
    compute.push_back(other[kCompute]);
    all.push_back(own(other));
    others.push_back(other[kCommunication] / (own(other) + other[kCommunication]));
  }
  const bool computes = numbers[kCompute] - median(compute) >= (own(numbers) - median(all)) / 2;
  slow.text = who + (computes ? " computes " : " takes ") + percent(change.excess) +
              " longer than the median since step " + with_commas(change.since) + "; of its time it waited for " +
              slow.waited_for + ", of theirs the others waited " + percent(median(others)) + " for other ranks";
  return slow;
}

void RankMetrics::add_fields(MetricsWriter::Fields& fields) {
  MetricsWriter::Table table;
  for (const Measure& measure : kMeasures) {
    std::vector<double> values;
    for (size_t i = 0; i < now_.size(); ++i) {
      const double before = measure.sum ? written_[i][measure.number] : 0;
      values.push_back(std::max(0.0, now_[i][measure.number] - before));
    }
    const auto most = std::max_element(values.begin(), values.end());
    if (!(*most > 0)) continue;
    const int64_t who = most - values.begin();
    table.push_back({std::string(measure.name),
                     {{"least", number(*std::min_element(values.begin(), values.end()), measure.whole)},
                      {"median", number(median(values), measure.whole)},
                      {"most", number(*most, measure.whole)},
                      {"most_rank", who}}});
    if (measure.number == kCompute && values.size() <= kListed) {
      fields.emplace_back("rank_compute_seconds", std::move(values));
    }
  }
  fields.emplace_back("ranks", std::move(table));
  written_ = now_;
}

void RankMetrics::forget(std::vector<Carried> of_ranks) {
  stragglers_.forget();
  now_ = std::move(of_ranks);
  written_ = now_;
  first_ = -1;
  last_.assign(1, now_);
  begins_.clear();
  if (said_ >= kProbes) return;
  all_wait_ = asks_ = false;
  said_ = 0;
}

}  // namespace annulus
