// See fitting.h.
#include "runtime/training/fitting.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "attention/plan/choice.h"
#include "comm/hosts.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/training/job.h"
#include "runtime/training/mesh.h"
#include "runtime/training/state/sharding.h"

namespace annulus {
namespace {

// With up to this many ranks along the context axis, all of them are planned to find the one that needs the most, and
// the one that sends the most.
constexpr int kFewRanks = 16;
// After this many plans the search continues by bisection, so that it ends however memory depends on the length.
constexpr size_t kEstimates = 12;

// Returns a schedule with one length for all rows and the batch of the longest stage.
ContextSchedule of_length(const DataConfig& data, int64_t length) {
  const std::vector<ContextSchedule::Stage>& stages = data.context.stages;
  const auto longest =
      std::ranges::max_element(stages, [](const auto& a, const auto& b) { return a.context < b.context; });
  ContextSchedule schedule(length);
  schedule.stages[0].batch = longest->batch;
  return schedule;
}

std::string listed(const std::vector<std::string>& words) {
  if (words.size() < 2) return words.empty() ? "" : words[0];
  return join({words.begin(), words.end() - 1}, ", ") + " and " + words.back();
}

// What a plan is compared with.
enum class Of { kDevice, kAll };

// A configuration's run on the rank of the context axis that needs the most.
struct PlannedRun {
  std::vector<Stage> stages;  // in which `auto` has chosen
  FitAttention attention;
  MemoryPlan memory;
  // The attention with which rows of some length may take least, and the rank that then needs the most. Of short rows
  // that is what holds least in a call, of long rows what keeps least for the backward.
  struct Least {
    std::vector<Stage> stages;
    int rank = 0;
  };
  std::vector<Least> least;
};

// Plans a configuration at any level, with or without recomputation, and with rows of any length.
class Fitting {
 public:
  Fitting(const Config& config, const FitRanks& ranks)
      : config_(config),
        ranks_(ranks),
        data_(fit_axes(mesh_axes(config), ranks.ranks)[0].size),
        context_(ranks.ranks / data_),
        stages_(check_training(config, ranks.ranks)),
        levels_(sharding(3).shards > 1 ? 4 : 1) {
    const double least = least_memory(config, sharding(0), context_);
    if (least >= kAnyMachine) highest_ = least_memory(config, sharding(levels_ - 1), context_);
  }

  int data() const { return data_; }
  int context() const { return context_; }
  int levels() const { return levels_; }  // the number of levels that differ, from level 0 on
  int64_t unit() const { return 2 * context_; }
  // The least bytes of a rank at the highest level, if even level 0's lower bound is too large to be planned.
  const std::optional<double>& beyond_planning() const { return highest_; }

  Sharding sharding(int level) const {
    return make_sharding(with(level, Keeps::kAll, {}, std::nullopt), ranks_.ranks, ranks_.ranks_of_a_host);
  }

  // The tiers that this way may use, in the order in which they are to be tried: first as configured, or with the
  // host's memory on GPUs and files on CPUs; then with the other one, and without optimizer.offload.
  std::vector<Tiers> tiers(Keeps keeps) const {
    const std::vector<std::string> all =
        ranks_.are == RanksAre::kGpus ? std::vector<std::string>{"host", "file"} : std::vector<std::string>{"file"};
    const auto from = [&](const std::string& configured) {
      std::vector<std::string> options = all;
      std::stable_partition(options.begin(), options.end(), [&](const auto& tier) { return tier == configured; });
      return options;
    };
    const std::vector<std::string> none = {"none"};
    const std::string& configured = config_.optimizer.offload;
    std::vector<std::string> of_optimizer =
        keeps == Keeps::kOptimizer || configured != "none" ? from(configured) : none;
    if (keeps != Keeps::kOptimizer && configured != "none") of_optimizer.emplace_back("none");
    std::vector<Tiers> found;
    for (const std::string& optimizer : of_optimizer) {
      for (const std::string& memory : keeps >= Keeps::kOffloaded ? from(config_.memory.offload) : none) {
        found.push_back({memory, optimizer});
      }
    }
    return found;
  }

  // `length` is that of the rows; nothing: as configured.
  Config with(int level, Keeps keeps, const Tiers& tiers, std::optional<int64_t> length) const {
    Config c = config_;
    c.optimizer.shard = level;
    c.model.recompute = keeps != Keeps::kAll;
    c.memory.offload = tiers.memory;
    c.optimizer.offload = tiers.optimizer;
    if (c.memory.offload == "host" || c.optimizer.offload == "host") c.device = "cuda";
    if (length) c.data.context = of_length(c.data, *length);
    return c;
  }

  // What the device keeps as it is configured, but for the optimizer.
  Keeps configured() const {
    return config_.memory.offload != "none" ? Keeps::kOffloaded
           : config_.model.recompute        ? Keeps::kRecomputed
                                            : Keeps::kAll;
  }

  // The run of with(level, keeps, tiers, length).
  const PlannedRun& run(int level, Keeps keeps, const Tiers& tiers, std::optional<int64_t> length = std::nullopt) {
    const auto key = std::make_tuple(level, keeps, tiers.memory, tiers.optimizer, length.value_or(0));
    const auto found = runs_.find(key);
    return found != runs_.end() ? found->second
                                : runs_[key] = make_run(with(level, keeps, tiers, length), level, length);
  }
  // With the first of tiers(keeps).
  const PlannedRun& run(int level, Keeps keeps) { return run(level, keeps, tiers(keeps)[0]); }

  // What the rank sends that sends the most, of those that are compared, with what is configured to be kept.
  AttentionTraffic attention(int level) {
    AttentionTraffic most;
    const std::vector<Stage>& stages = run(level, configured()).stages;
    for (const int rank : compared()) {
      const AttentionTraffic sent = attention_traffic(config_, stages, rank);
      if (sent.total() > most.total()) most = sent;
    }
    return most;
  }

  // Of a rank, in a step.
  double flops() const {
    const Stage& longest = *std::ranges::max_element(
        stages_, [](const Stage& a, const Stage& b) { return a.batch * a.context < b.batch * b.context; });
    const double tokens = static_cast<double>(longest.batch) * static_cast<double>(longest.context) / ranks_.ranks;
    return tokens * flops_per_token(model_shape(config_), longest.layers.pairs_per_token()) *
           static_cast<double>(config_.data.accumulate.most());
  }

  // `tiers` of a way are given; `longest` is that of the device alone.
  FitWay way(Keeps keeps, const Tiers& tiers, std::optional<int64_t> longest) {
    const int level = levels_ - 1;
    const Config c = with(level, keeps, tiers, std::nullopt);
    const PlannedRun& run = this->run(level, keeps, tiers);
    const MemoryPlan& of_rank = run.memory;
    FitWay way{.keeps = keeps,
               .tiers = tiers,
               .attention = run.attention,
               .device = of_rank.total(),
               .of_host = plan_offload(c, of_rank, ranks_.ranks_of_a_host, ranks_.are),
               .moved = of_rank.offloaded * config_.data.accumulate.most(),
               .optimizer_moved = of_rank.state.moved,
               .fits = load(c, of_rank) <= 1};
    way.longest = bounded() ? this->longest(level, keeps, tiers, kLongestPlanned) : longest;
    return way;
  }

  // A lower bound of what any plan needs, in bytes.
  double least(int level, std::optional<int64_t> length) const {
    return least_memory(with(level, Keeps::kOptimizer, tiers(Keeps::kOptimizer)[0], length), sharding(level), context_);
  }
  bool fits_device(const MemoryPlan& plan) const { return static_cast<double>(plan.total()) <= ranks_.memory; }
  // What a configuration takes over what there is: of the device, of the host's memory or of files, of which it takes
  // the largest part. It fits if this is at most 1.
  double load(const Config& c, const MemoryPlan& plan, Of of = Of::kAll) const {
    if (of == Of::kDevice) return static_cast<double>(plan.total()) / ranks_.memory;
    const OffloadPlan of_host = plan_offload(c, plan, ranks_.ranks_of_a_host, ranks_.are);
    const auto part = [](int64_t bytes, const std::optional<double>& of) {
      return bytes == 0 || !of ? 0 : static_cast<double>(bytes) / *of;
    };
    return std::max(
        {load(c, plan, Of::kDevice), part(of_host.host, ranks_.host_memory), part(of_host.files, ranks_.files)});
  }
  // "80.0 MB of a host's memory and 20.0 GB of files for its 8 ranks"
  std::string offload_text(const Config& c, const MemoryPlan& plan) const {
    const OffloadPlan of_host = plan_offload(c, plan, ranks_.ranks_of_a_host, ranks_.are);
    std::vector<std::string> kinds;
    if (of_host.host > 0) kinds.push_back(bytes_text(static_cast<double>(of_host.host)) + " of a host's memory");
    if (of_host.files > 0) kinds.push_back(bytes_text(static_cast<double>(of_host.files)) + " of files");
    return listed(kinds) + " for its " + counted(ranks_.ranks_of_a_host, "rank");
  }
  bool bounded() const { return ranks_.host_memory || ranks_.files; }

  // Returns the length of the longest rows, of at most `most` tokens, that fit with the attention that takes least; 0
  // if none do, nothing if rows of some length are impossible. Memory is nearly affine in the length, so the next
  // length to try is the one at which the line through two known loads reaches 1; or, where the line bends and the
  // estimates come from one side alone, the middle.
  std::optional<int64_t> longest(int level, Keeps keeps, const Tiers& tiers, int64_t most, Of of = Of::kAll) {
    const PlannedRun& run = this->run(level, keeps, tiers);
    int64_t fit = 0, too_long = most / unit() + 1;  // in units
    std::map<int64_t, double> known;
    int fitted = 0;  // how many of the last plans fit, or, negative, did not
    for (int64_t next = 1; too_long - fit > 1;) {
      if (least(level, next * unit()) >= kAnyMachine) {
        too_long = next;
      } else {
        try {
          const Config c = with(level, keeps, tiers, next * unit());
          for (const PlannedRun::Least& least : run.least) {
            const double now = load(c, plan(c, stages_of(c, least, next * unit()), level, least.rank), of);
            known[next] = known.contains(next) ? std::min(known[next], now) : now;
          }
        } catch (const Error& e) {
          if (e.kind() != ErrorKind::kPlan) throw;
          return std::nullopt;
        }
        const bool fits_now = known[next] <= 1;
        (fits_now ? fit : too_long) = next;
        fitted = fits_now ? std::max(fitted, 0) + 1 : std::min(fitted, 0) - 1;
      }
      const int64_t configured = config_.data.context.longest() / unit();
      const bool one_sided = std::abs(fitted) > 2 && known.contains(fit) && known.contains(too_long);
      next = known.size() == 1 && next == 1            ? std::max<int64_t>(2, configured)
             : known.size() < kEstimates && !one_sided ? estimate(known)
                                                       : (fit + too_long) / 2;
      next = std::clamp(next, fit + 1, std::max(fit + 1, too_long - 1));
    }
    return fit * unit();
  }

 private:
  // Returns the length at which the line through the two known loads around (or nearest to) 1 reaches it. Example: if
  // 10 units take 0.8 of the memory and 20 units 1.4, all of it is reached at 13 units.
  int64_t estimate(const std::map<int64_t, double>& known) const {
    if (known.size() < 2) return 1;
    auto above = std::ranges::find_if(known, [](const auto& at) { return at.second > 1; });
    if (above == known.end()) --above;
    if (above == known.begin()) ++above;
    const auto below = std::prev(above);
    const double slope = (above->second - below->second) / static_cast<double>(above->first - below->first);
    const double end = static_cast<double>(below->first) + (1 - below->second) / slope;
    return slope > 0 && end < 1e15 ? static_cast<int64_t>(std::floor(end)) : int64_t{1} << 50;
  }

  MemoryPlan plan(const Config& c, const std::vector<Stage>& stages, int level, int rank) const {
    return plan_memory(c, stages, sharding(level), context_, rank, ranks_.are);
  }

  // Returns the plan of the rank that needs the most, of those that are compared, and sets `rank` to it.
  MemoryPlan plan_most(const Config& c, const std::vector<Stage>& stages, int level, int& rank) const {
    std::optional<MemoryPlan> most;
    for (const int one : compared()) {
      MemoryPlan plan = this->plan(c, stages, level, one);
      if (most && plan.total() <= most->total()) continue;
      most = std::move(plan), rank = one;
    }
    return std::move(*most);
  }

  PlannedRun make_run(const Config& c, int level, std::optional<int64_t> length) {
    PlannedRun run;
    const std::vector<Stage> asked = length || c.memory.offload != config_.memory.offload
                                         ? check_training(c, ranks_.ranks)  // other rows, or layers that keep something
                                         : stages_;
    run.stages = asked;
    const bool can_fit = least_memory(c, sharding(level), context_) <= ranks_.memory;  // if not, nothing is compared
    const RunChoice choice = choose_for_run(
        run.stages, c, ranks_.are == RanksAre::kGpus ? "cuda" : "cpu",
        RankHosts::filled(ranks_.ranks, ranks_.ranks_of_a_host).first(context_),
        [&](const std::vector<Stage>& tried) -> std::optional<double> {
          if (!can_fit) return std::nullopt;
          int64_t most = std::numeric_limits<int64_t>::min();
          for (const int rank : compared()) most = std::max(most, lacking(c, plan(c, tried, level, rank), ranks_));
          return static_cast<double>(most);
        },
        "");
    run.attention = {attention_text(run.stages, c.attention.layout == kAutoLayout), choice.leanest};
    run.memory = plan_most(c, run.stages, level, run.attention.rank);
    run.least.push_back({run.stages, run.attention.rank});
    if (choice.record.empty()) return run;
    for (const bool of_a_call : {false, true}) {
      std::vector<Stage> terms = asked, least = asked;
      for (Stage& stage : terms) {
        for (PlanRequest& request : stage.layers.distinct) {
          PlanTerms one = *request.terms;
          if (of_a_call) one.layers = 1;
          request.terms = std::move(one);
        }
      }
      keep_schedules(terms, c.mesh.data, least);
      const auto same = [&](const PlannedRun::Least& of) {
        return attention_text(of.stages, /*layouts=*/true) == attention_text(least, /*layouts=*/true);
      };
      if (std::ranges::any_of(run.least, same)) continue;
      int rank = 0;
      plan_most(c, least, level, rank);
      run.least.push_back({std::move(least), rank});
    }
    return run;
  }

  // The stages of rows of another length that have this attention.
  const std::vector<Stage>& stages_of(Config c, const PlannedRun::Least& least, int64_t length) {
    const auto key = std::make_pair(attention_text(least.stages, /*layouts=*/true), length);
    const auto found = other_stages_.find(key);
    if (found != other_stages_.end()) return found->second;
    c.attention.layout = to_string(least.stages[0].layers.distinct[0].layout);
    std::vector<Stage> stages = check_training(c, ranks_.ranks);
    keep_schedules(least.stages, c.mesh.data, stages);
    return other_stages_[key] = std::move(stages);
  }

  // The ranks of the context axis that are planned to find the one that needs, or sends, the most.
  std::vector<int> compared() const {
    if (ranks_.planned) return {*ranks_.planned};
    if (context_ > kFewRanks) return {0, 1, context_ / 2, context_ - 2, context_ - 1};
    std::vector<int> all;
    for (int rank = 0; rank < context_; ++rank) all.push_back(rank);
    return all;
  }

  const Config& config_;
  const FitRanks& ranks_;
  const int data_, context_;
  const std::vector<Stage> stages_;
  const int levels_;
  std::optional<double> highest_;
  std::map<std::tuple<int, Keeps, std::string, std::string, int64_t>, PlannedRun> runs_;
  std::map<std::pair<std::string, int64_t>, std::vector<Stage>> other_stages_;  // by attention and length
};

std::string level_text(int level, Keeps keeps) {
  return "optimizer.shard = " + std::to_string(level) +
         (keeps == Keeps::kAll          ? ""
          : keeps == Keeps::kRecomputed ? " with model.recompute"
          : keeps == Keeps::kOffloaded  ? " with memory.offload"
                                        : " with optimizer.offload");
}

}  // namespace

const char* to_string(Keeps keeps) {
  switch (keeps) {
    case Keeps::kAll:
      return "all";
    case Keeps::kRecomputed:
      return "recompute";
    case Keeps::kOffloaded:
      return "offload";
    case Keeps::kOptimizer:
      break;
  }
  return "optimizer";
}

FitTable what_fits(const Config& config, const FitRanks& ranks,
                   const std::function<void(const std::string&)>& progress) {
  Fitting fitting(config, ranks);
  const auto say = [&](const std::string& text) {
    if (progress) progress(text);
  };
  if (fitting.beyond_planning()) {
    require_memory("at least ", fitting.least(0, std::nullopt), 1, std::nullopt, nullptr);
  }
  const ModelShape shape = model_shape(config);
  const Sharding cut = fitting.sharding(fitting.levels() - 1);
  FitTable table{.parameters = parameter_count(shape),
                 .data = fitting.data(),
                 .context = fitting.context(),
                 .shards = cut.shards,
                 .replicas = cut.replicas,
                 .flops = fitting.flops()};
  Parameters parameters(described_units(shape));
  parameters.lay_out(cut.shards);
  const auto element = static_cast<double>(c10::elementSize(compute_dtype(config)));
  const auto wide = static_cast<double>(c10::elementSize(at::toOpMathType(compute_dtype(config))));
  for (int level = 0; level < fitting.levels(); ++level) {
    for (const Keeps keeps : kAllKeeps) {
      say("planning " + level_text(level, keeps));
      const PlannedRun& run = fitting.run(level, keeps);
      const MemoryPlan& plan = run.memory;
      Fit fit{.level = level,
              .keeps = keeps,
              .attention = run.attention,
              .bytes = plan.kinds(),
              .fits = fitting.fits_device(plan)};
      say("looking for the longest rows of " + level_text(level, keeps));
      fit.longest = fitting.longest(level, keeps, fitting.tiers(keeps)[0], kLongestPlanned, Of::kDevice);
      table.fits.push_back(fit);
      table.caches = plan.caches;
      if (keeps == Keeps::kAll) table.save_copy = plan.save_copy;
      table.caches_on_device = plan.caches_on_device;
      table.selects_what_travels = plan.selects_what_travels;
      if (level + 1 < fitting.levels()) continue;
      say("looking for the longest rows of each way");
      for (const Tiers& tiers : fitting.tiers(keeps)) {
        const bool shown = tiers == fitting.tiers(keeps)[0] ||
                           (keeps == Keeps::kOptimizer ? tiers.memory == tiers.optimizer
                                                       : tiers.optimizer == fitting.tiers(keeps)[0].optimizer);
        if (!shown) continue;
        table.ways.push_back(fitting.way(keeps, tiers, fit.longest));
      }
    }
    const StateTraffic sent =
        state_traffic(parameters, fitting.sharding(level), shape.tie_embeddings, config.data.accumulate.most());
    table.traffic.push_back(
        {level, wide * sent.reduced, (level == 0 ? wide : element) * sent.gathered, fitting.attention(level)});
  }
  return table;
}

NearestFit nearest_fit(const Config& config, const FitRanks& ranks) {
  Fitting fitting(config, ranks);
  const int now = std::min(static_cast<int>(config.optimizer.shard), fitting.levels() - 1);
  const int highest = fitting.levels() - 1;
  const Keeps keeps_now = fitting.configured();
  const auto found = [&](int level, Keeps keeps, const Tiers& tiers, std::optional<int64_t> length) {
    const int64_t bytes = fitting.run(level, keeps, tiers, length).memory.total();
    NearestFit nearest{.found = true, .level = level, .keeps = keeps, .tiers = tiers, .context = config.data.context};
    std::vector<std::string> changed;
    if (level != now) changed.push_back("optimizer.shard = " + std::to_string(level));
    if (keeps != Keeps::kAll && !config.model.recompute) changed.emplace_back("model.recompute = true");
    const auto offload = [&](const char* key, const std::string& configured, const std::string& tier) {
      if (tier != configured) changed.push_back(std::string(key) + " = \"" + tier + "\"");
    };
    offload("memory.offload", config.memory.offload, tiers.memory);
    offload("optimizer.offload", config.optimizer.offload, tiers.optimizer);
    if (length) {
      nearest.context = of_length(config.data, *length);
      changed.push_back("data.context = " + nearest.context.text());
    }
    nearest.text =
        (changed.empty() ? "it fits as it is configured" : listed(changed) + (changed.size() == 1 ? " fits" : " fit")) +
        " (" + bytes_text(static_cast<double>(bytes)) + " a rank)";
    return nearest;
  };
  std::vector<Keeps> ways;
  for (const Keeps keeps : kAllKeeps) {
    if (keeps >= keeps_now) ways.push_back(keeps);
  }
  // Where the tiers are too small for what is configured, the device may do without.
  if (keeps_now == Keeps::kOffloaded && fitting.bounded()) ways.push_back(Keeps::kRecomputed);
  if (fitting.beyond_planning()) ways.clear();
  for (const Keeps keeps : ways) {
    for (int level = now; level <= highest; ++level) {
      for (const Tiers& tiers : fitting.tiers(keeps)) {
        const Config with = fitting.with(level, keeps, tiers, std::nullopt);
        const MemoryPlan& plan = fitting.run(level, keeps, tiers).memory;
        if (fitting.load(with, plan) <= 1) return found(level, keeps, tiers, std::nullopt);
        if (!fitting.bounded()) break;
      }
    }
  }
  std::string why = "no optimizer.shard, model.recompute, offload or shorter data.context makes it fit: ";
  const std::string at =
      "optimizer.shard = " + std::to_string(highest) + ", model.recompute = true, memory.offload and optimizer.offload";
  if (fitting.beyond_planning()) {
    return {.text = why + "with " + at + " it needs at least " + bytes_text(*fitting.beyond_planning()) + " a rank"};
  }
  // The longest rows: with everything away from the device or, where other memory is scarce, with less.
  int64_t longest = 0;
  Keeps keeps_longest = Keeps::kOptimizer;
  Tiers longest_tiers;
  for (const Keeps keeps : {Keeps::kOptimizer, Keeps::kOffloaded, Keeps::kRecomputed}) {
    if (keeps != Keeps::kOptimizer && !fitting.bounded()) break;
    for (const Tiers& tiers : fitting.tiers(keeps)) {
      const std::optional<int64_t> rows = fitting.longest(highest, keeps, tiers, config.data.context.longest() - 1);
      if (!rows) {
        return {.text =
                    "no optimizer.shard, model.recompute or offload makes it fit, and its patterns need these rows"};
      }
      if (*rows > longest) longest = *rows, keeps_longest = keeps, longest_tiers = tiers;
      if (!fitting.bounded()) break;
    }
  }
  const int64_t shortest = fitting.unit();
  if (longest > 0) return found(highest, keeps_longest, longest_tiers, longest);
  why += "with " + at + " even rows of " + with_commas(shortest, "token") + " need ";
  const Tiers tiers = fitting.tiers(Keeps::kOptimizer)[0];
  const MemoryPlan& least = fitting.run(highest, Keeps::kOptimizer, tiers, shortest).memory;
  const MemoryKinds held = least.kinds();
  if (fitting.fits_device(least)) {
    return {.text = why + fitting.offload_text(fitting.with(highest, Keeps::kOptimizer, tiers, shortest), least)};
  }
  return {.text = why + bytes_text(static_cast<double>(held.total())) + " a rank, of which weights, gradients and " +
                  "optimizer are " + bytes_text(static_cast<double>(held.weights + held.gradients + held.optimizer)) +
                  ", and the working memory is " + bytes_text(static_cast<double>(held.working))};
}

}  // namespace annulus
