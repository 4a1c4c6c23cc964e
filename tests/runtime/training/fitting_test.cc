// Tests of runtime/training/fitting.h: which sharding levels and context lengths of a configuration fit into memory,
// checked against the memory plans themselves.
#include "runtime/training/fitting.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "attention/plan/choice.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/model/model.h"
#include "runtime/training/job.h"
#include "runtime/training/state/sharding.h"
#include "runtime/training/training.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::fitting_test {
namespace {

class Fitting : public ::testing::Test {
 protected:
  Fitting() : config_(tiny_config(folder_)) {
    config_.model.dtype = "bf16";
    config_.model.layers = 8;
    config_.model.dim = 128;
    config_.model.ffn = 384;
    config_.data.context = 512;
    config_.data.batch = 2;
    config_.attention.schedule = "ring";  // `auto` has a test of its own
  }

  // The plan of a configuration with these keys, over `ranks` ranks of one host.
  static int64_t planned(Config c, int level, Keeps keeps, int64_t context, const FitRanks& ranks) {
    c.optimizer.shard = level;
    c.model.recompute = keeps != Keeps::kAll;
    const std::string tier = ranks.are == RanksAre::kGpus ? "host" : "file";
    if (keeps >= Keeps::kOffloaded) c.memory.offload = tier;
    if (keeps == Keeps::kOptimizer) c.optimizer.offload = tier;
    if (ranks.are == RanksAre::kGpus) c.device = "cuda";
    c.data.context = context;
    const int along = ranks.ranks / static_cast<int>(c.mesh.data);
    return plan_memory(c, check_training(c, ranks.ranks), make_sharding(c, ranks.ranks, ranks.ranks_of_a_host), along,
                       ranks.planned.value_or(0), ranks.are)
        .total();
  }
  int64_t planned(int level, Keeps keeps, int64_t context, const FitRanks& ranks) const {
    return planned(config_, level, keeps, context, ranks);
  }
  int64_t padded_elements() const {
    Parameters parameters(described_units(model_shape(config_)));
    parameters.lay_out(4);
    return parameters.elements();
  }
  NearestFit nearest(double memory) const { return nearest_fit(config_, four(memory)); }
  static FitRanks four(double memory) {
    return {.ranks = 4, .ranks_of_a_host = 4, .are = RanksAre::kGpus, .memory = memory, .planned = {}};
  }

  TestFolder folder_;
  Config config_;
};

// A higher sharding level takes no more memory, and recomputed activations take less than kept ones.
TEST_F(Fitting, HigherLevelsAndRecomputationTakeLessMemory) {
  const FitTable table = what_fits(config_, four(1e9));
  ASSERT_EQ(table.fits.size(), 16U);
  EXPECT_EQ(table.parameters, parameter_count(model_shape(config_)));
  EXPECT_EQ(table.context, 4);
  EXPECT_EQ(table.shards, 4);
  for (size_t i = 0; i < table.fits.size(); ++i) {
    const Fit& fit = table.fits[i];
    EXPECT_EQ(fit.level, static_cast<int>(i / 4));
    EXPECT_EQ(fit.keeps, kAllKeeps[i % 4]);
    EXPECT_EQ(fit.bytes.total(), planned(fit.level, fit.keeps, 512, four(0)));
    EXPECT_TRUE(fit.fits);
    const auto state = [](const Fit& of) { return of.bytes.weights + of.bytes.gradients + of.bytes.optimizer; };
    if (fit.keeps != Keeps::kAll) {
      EXPECT_GT(fit.longest, table.fits[i - 1].longest);
    }
    if (fit.keeps == Keeps::kOptimizer) {
      EXPECT_LT(state(fit), state(table.fits[i - 1]));
    } else if (fit.keeps != Keeps::kAll) {
      EXPECT_LT(fit.bytes.activations, table.fits[i - 1].bytes.activations);
    }
    if (i >= 4) {
      EXPECT_LT(state(fit), state(table.fits[i - 4]));
    }
  }
}

// Of all kept and recomputed there is one way, of offload one for each tier, which take the same on the device.
TEST_F(Fitting, WaysAreThoseOfEachTier) {
  FitRanks ranks = four(1e9);
  const FitTable table = what_fits(config_, ranks);
  const std::vector<FitWay>& ways = table.ways;
  std::vector<Tiers> tiers;
  for (const FitWay& way : ways) {
    tiers.push_back(way.tiers);
    const Fit& device = table.fits[12 + static_cast<size_t>(way.keeps)];
    EXPECT_EQ(way.device, device.bytes.total());
    EXPECT_EQ(way.longest, device.longest);  // nothing bounds the tiers
    EXPECT_TRUE(way.fits);
    EXPECT_EQ(way.of_host.host > 0, way.tiers.memory == "host" || way.tiers.optimizer == "host" ||
                                        way.keeps >= Keeps::kOffloaded);  // on their way to files as well
    EXPECT_EQ(way.of_host.files > 0, way.tiers.memory == "file");
    EXPECT_EQ(way.moved > 0, way.keeps >= Keeps::kOffloaded);
    // In bf16 what is updated and its moments are fp32, at level 3 a quarter of them on each rank.
    EXPECT_EQ(way.optimizer_moved, way.keeps == Keeps::kOptimizer ? 3 * 4 * padded_elements() / 4 : 0);
  }
  EXPECT_EQ(
      tiers,
      (std::vector<Tiers>{
          {"none", "none"}, {"none", "none"}, {"host", "none"}, {"file", "none"}, {"host", "host"}, {"file", "file"}}));
  EXPECT_EQ(ways[2].of_host.host, 4 * ways[2].moved);
  EXPECT_GE(ways[4].of_host.host, 4 * ways[4].total_moved());
  EXPECT_GE(ways[5].of_host.files, 4 * ways[5].total_moved());

  // What is configured comes first, and the optimizer's state stays where it is.
  config_.memory.offload = "file", config_.optimizer.offload = "host", config_.model.recompute = true;
  config_.device = "cuda";
  tiers.clear();
  for (const FitWay& way : what_fits(config_, ranks).ways) tiers.push_back(way.tiers);
  EXPECT_EQ(tiers, (std::vector<Tiers>{{"none", "host"},
                                       {"none", "host"},
                                       {"file", "host"},
                                       {"host", "host"},
                                       {"file", "host"},
                                       {"host", "host"},
                                       {"file", "file"}}));
  ranks.are = RanksAre::kProcesses;
  for (const FitWay& way : what_fits(config_, ranks).ways) EXPECT_NE(way.tiers.memory, "host");
}

// The rows of a way fit into the host's memory and files as well, and rows longer by one unit do not.
TEST_F(Fitting, WaysAreBoundByTheirTiers) {
  FitRanks ranks = four(1e9);
  config_.data.context = 16384;  // for which the buffers of files are small
  const std::vector<FitWay> all = what_fits(config_, ranks).ways;
  ranks.host_memory = 0.9 * static_cast<double>(all[2].of_host.host);
  ranks.files = 1.2 * static_cast<double>(all[3].of_host.files);
  const FitTable table = what_fits(config_, ranks);
  ranks.planned = table.fits[0].attention.rank;
  EXPECT_EQ(table.fits[14].longest, what_fits(config_, four(1e9)).fits[14].longest);  // of the device alone
  for (const FitWay& way : table.ways) {
    EXPECT_EQ(way.fits, way.longest >= 16384) << way.tiers.memory;
    if (way.tiers.memory == "none") continue;
    EXPECT_GT(way.longest, 0) << way.tiers.memory;
    for (const int64_t more : {0, 8}) {
      Config c = config_;
      c.optimizer.shard = 3, c.model.recompute = true, c.device = "cuda";
      c.memory.offload = way.tiers.memory, c.optimizer.offload = way.tiers.optimizer;
      c.data.context = *way.longest + more;
      const MemoryPlan plan =
          plan_memory(c, check_training(c, 4), make_sharding(c, 4, 4), 4, *ranks.planned, ranks.are);
      const OffloadPlan of_host = plan_offload(c, plan, 4, ranks.are);
      EXPECT_EQ(
          static_cast<double>(of_host.host) <= *ranks.host_memory && static_cast<double>(of_host.files) <= *ranks.files,
          more == 0)
          << way.tiers.memory << ", " << *way.longest + more;
    }
  }
  EXPECT_FALSE(table.ways[2].fits);
  EXPECT_TRUE(table.ways[3].fits);
}

// A tier that is too small is not proposed.
TEST_F(Fitting, NearestFitMindsHostMemoryAndDisks) {
  FitRanks ranks = four(0);
  config_.data.context = 16384;
  double recomputed = 1e18;
  for (const int level : {0, 1, 2, 3}) {
    recomputed = std::min(recomputed, static_cast<double>(planned(level, Keeps::kRecomputed, 16384, ranks)));
  }
  ranks.memory = recomputed - 1;  // offload is needed
  EXPECT_EQ(nearest_fit(config_, ranks).tiers, (Tiers{"host", "none"}));
  const std::vector<FitWay> ways = what_fits(config_, ranks).ways;
  ranks.host_memory = static_cast<double>(ways[2].of_host.host) - 1;
  const NearestFit in_files = nearest_fit(config_, ranks);
  EXPECT_EQ(in_files.tiers, (Tiers{"file", "none"}));
  EXPECT_NE(in_files.text.find("memory.offload = \"file\" fit ("), std::string::npos) << in_files.text;
  EXPECT_EQ(in_files.context, config_.data.context);
  // Shorter rows keep less in files.
  ranks.files = static_cast<double>(ways[3].of_host.files) - 1;
  const NearestFit shorter = nearest_fit(config_, ranks);
  EXPECT_TRUE(shorter.found);
  EXPECT_LT(shorter.context.longest(), 16384);
  // With nothing but the device, rows are recomputed and shorter.
  ranks.host_memory = ranks.files = 0;
  const NearestFit none = nearest_fit(config_, ranks);
  EXPECT_EQ(none.keeps, Keeps::kRecomputed);
  EXPECT_EQ(none.tiers, Tiers{});
  EXPECT_LT(none.context.longest(), 16384);
  EXPECT_EQ(none.text.find("offload"), std::string::npos) << none.text;
  // Where the device has room, what was to be offloaded stays.
  ranks.memory = 1e9;
  config_.memory.offload = "host", config_.model.recompute = true, config_.device = "cuda";
  EXPECT_NE(nearest_fit(config_, ranks).text.find("memory.offload = \"none\" fits ("), std::string::npos)
      << nearest_fit(config_, ranks).text;
}

// Rows of the reported longest length fit, and rows longer by one unit (lengths are multiples of it) do not.
TEST_F(Fitting, LongestContextFitsAndTheNextLongerDoesNot) {
  for (const int64_t data : {1, 2}) {
    for (const char* layout : {"zigzag", "contiguous"}) {
      Config c = config_;
      c.mesh.data = data;
      c.attention.layout = layout;
      // The memory suffices for longer rows than configured, or only for shorter ones.
      for (const double of_configured : {1.7, 0.95}) {
        FitRanks ranks = four(0);
        ranks.memory = of_configured * static_cast<double>(planned(c, 3, Keeps::kRecomputed, 512, ranks));
        const FitTable table = what_fits(c, ranks);
        ranks.planned = table.fits[0].attention.rank;
        const int64_t unit = 2 * 4 / data;
        for (const Fit& fit : table.fits) {
          const std::string what = std::string(layout) + ", level " + std::to_string(fit.level) + ", " +
                                   to_string(fit.keeps) + ", data " + std::to_string(data);
          ASSERT_TRUE(fit.longest) << what;
          EXPECT_EQ(*fit.longest % unit, 0) << what;
          EXPECT_EQ(fit.fits, *fit.longest >= 512) << what;
          if (*fit.longest > 0) {
            EXPECT_LE(planned(c, fit.level, fit.keeps, *fit.longest, ranks), ranks.memory) << what;
          }
          EXPECT_GT(planned(c, fit.level, fit.keeps, *fit.longest + unit, ranks), ranks.memory) << what;
        }
        EXPECT_GT(table.fits.back().longest, 0);
      }
    }
  }
}

TEST_F(Fitting, LongestContextIsCappedAtTheSearchLimit) {
  config_.model.layers = 1;
  config_.model.dim = 32;
  config_.model.ffn = 32;
  for (const Fit& fit : what_fits(config_, four(1e15)).fits) EXPECT_EQ(fit.longest, kLongestPlanned);
}

// A block map from a file, or segments that must be equal, fix the length of the rows.
TEST_F(Fitting, PatternsOfFixedLengthHaveNoLongestContext) {
  config_.model.pattern.all = parse_pattern(
      "{ kind = 'dilated', segment_lengths = [128], dilation_rates = [1], equal_segments = true, causal = true }", "t");
  for (const Fit& fit : what_fits(config_, four(1e9)).fits) {
    EXPECT_TRUE(fit.fits);
    EXPECT_FALSE(fit.longest);
  }
  EXPECT_NE(nearest(1000).text.find("its patterns need these rows"), std::string::npos) << nearest(1000).text;
}

TEST_F(Fitting, SingleRankHasOnlyLevelZero) {
  const FitTable table =
      what_fits(config_, {.ranks = 1, .ranks_of_a_host = 1, .are = RanksAre::kProcesses, .memory = 1e9, .planned = {}});
  EXPECT_EQ(table.fits.size(), 4U);
  EXPECT_EQ(table.traffic.size(), 1U);
  EXPECT_EQ(table.traffic[0].reduced + table.traffic[0].gathered, 0);
}

// A step at level 0 sends fp32 sums both ways; from level 1 on it gathers bf16 weights instead, and at level 3 it
// gathers those of the layers twice.
TEST_F(Fitting, ReportsTrafficPerStep) {
  const std::vector<FitTraffic> sent = what_fits(config_, four(1e9)).traffic;
  ASSERT_EQ(sent.size(), 4U);
  for (const FitTraffic& level : sent) EXPECT_EQ(level.reduced, sent[0].reduced);
  EXPECT_EQ(sent[0].gathered, sent[0].reduced);
  EXPECT_EQ(sent[1].gathered, sent[0].gathered / 2);
  EXPECT_EQ(sent[2].gathered, sent[1].gathered);
  EXPECT_GT(sent[3].gathered, sent[2].gathered);
  EXPECT_LT(sent[3].gathered, 2 * sent[2].gathered);
}

// Each rank of the context axis sends in a real step as many bytes of keys, values and gradients as planned, and the
// table has those of the rank that sends the most.
TEST_F(Fitting, ReportsWhatAttentionSendsInAStep) {
  config_ = tiny_config(folder_);
  config_.attention.schedule = "ring";
  config_.data.context.stages = {{.step = 0, .context = 32}, {.step = 1, .context = 64}};
  config_.model.layers = 3;
  const PatternSpec window = parse_pattern("{ kind = 'window', left = 20, right = 0 }", "t");
  config_.model.pattern = std::vector<PatternSpec>{causal_pattern(), window, causal_pattern()};
  struct Case {
    const char *dtype, *layout;
    int64_t data, accumulate;
  };
  for (const auto& [dtype, layout, data, accumulate] :
       {Case{"fp32", "zigzag", 1, 1}, {"bf16", "contiguous", 1, 2}, {"fp64", "zigzag", 2, 1}}) {
    Config c = config_;
    c.model.dtype = dtype;
    c.attention.layout = layout;
    c.mesh.data = data;
    c.data.accumulate = accumulate;
    const std::vector<Stage> stages = check_training(c, 4);
    const Dataset tokens(c.data, c.run.seed, c.model.vocab);
    run_ranks(4, [&](Communicator& world) {
      Training training(c, world, tokens, at::kCPU);
      const Communicator& ring = training.mesh().axis("context");
      training.step();  // of the shorter rows
      training.step();  // in which the ranks prove the plans of the longer ones, and send digests for it
      const int64_t before = ring.stats().bytes_sent;
      training.step();
      const AttentionTraffic planned = attention_traffic(c, stages, ring.rank());
      EXPECT_EQ(static_cast<double>(ring.stats().bytes_sent - before), planned.total())
          << c.model.dtype << ", rank " << ring.rank() << " of " << ring.size();
      EXPECT_GT(planned.total(), 0);
    });
    double most = 0;
    for (int rank = 0; rank < 4 / data; ++rank) most = std::max(most, attention_traffic(c, stages, rank).total());
    const std::vector<FitTraffic> levels = what_fits(c, four(1e9)).traffic;
    for (const FitTraffic& level : levels) EXPECT_EQ(level.attention.total(), most);
  }
}

// Without other ranks nothing is sent, and what a pattern selects at run time is not known.
TEST_F(Fitting, CountsNoTrafficThatIsNotPlanned) {
  EXPECT_EQ(attention_traffic(config_, check_training(config_, 1), 0).total(), 0);
  config_.model.pattern = parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 64, keep = 2 }", "t");
  EXPECT_EQ(attention_traffic(config_, check_training(config_, 4), 0).total(), 0);
}

TEST_F(Fitting, NearestFitChangesTheFewestSettings) {
  config_.model.dim = 256;
  const FitRanks ranks = four(0);
  const auto of = [&](int level, Keeps keeps) { return static_cast<double>(planned(level, keeps, 512, ranks)); };
  constexpr Keeps kAll = Keeps::kAll, kRecomputed = Keeps::kRecomputed, kOffloaded = Keeps::kOffloaded;
  const NearestFit itself = nearest(of(0, kAll));
  EXPECT_TRUE(itself.found);
  EXPECT_EQ(itself.level, 0);
  EXPECT_EQ(itself.text, "it fits as it is configured (" + bytes_text(of(0, kAll)) + " a rank)");

  const NearestFit higher = nearest(of(0, kAll) - 1);
  EXPECT_EQ(higher.level, 1);
  EXPECT_EQ(higher.keeps, kAll);
  EXPECT_EQ(higher.text, "optimizer.shard = 1 fits (" + bytes_text(of(1, kAll)) + " a rank)");

  // This is too little memory for any level without recomputation.
  const double without = std::min({of(0, kAll), of(1, kAll), of(2, kAll), of(3, kAll)}) - 1;
  const NearestFit both = nearest(without);
  EXPECT_EQ(both.keeps, kRecomputed);
  EXPECT_EQ(both.context, config_.data.context);
  EXPECT_LE(of(both.level, kRecomputed), without);
  if (both.level > 0) {
    EXPECT_GT(of(both.level - 1, kRecomputed), without);
    EXPECT_NE(both.text.find(" and model.recompute = true fit ("), std::string::npos) << both.text;
  }

  const double recomputed = std::min({of(0, kRecomputed), of(1, kRecomputed), of(2, kRecomputed), of(3, kRecomputed)});
  const NearestFit offloaded = nearest(recomputed - 1);
  EXPECT_EQ(offloaded.keeps, kOffloaded);
  EXPECT_EQ(offloaded.context, config_.data.context);
  EXPECT_NE(offloaded.text.find("model.recompute = true and memory.offload = \"host\" fit ("), std::string::npos)
      << offloaded.text;

  double offload = of(0, kOffloaded);
  for (const int level : {1, 2, 3}) offload = std::min(offload, of(level, kOffloaded));
  const NearestFit optimizer = nearest(offload - 1);
  EXPECT_EQ(optimizer.keeps, Keeps::kOptimizer);
  EXPECT_EQ(optimizer.context, config_.data.context);
  EXPECT_NE(
      optimizer.text.find("model.recompute = true, memory.offload = \"host\" and optimizer.offload = \"host\" fit ("),
      std::string::npos)
      << optimizer.text;

  const NearestFit shorter = nearest(of(3, Keeps::kOptimizer) - 1);
  EXPECT_TRUE(shorter.found);
  EXPECT_EQ(shorter.level, 3);
  EXPECT_LT(shorter.context.longest(), 512);
  EXPECT_EQ(shorter.text,
            "optimizer.shard = 3, model.recompute = true, memory.offload = \"host\", optimizer.offload = \"host\" and "
            "data.context = " +
                shorter.context.text() + " fit (" +
                bytes_text(static_cast<double>(planned(3, Keeps::kOptimizer, shorter.context.longest(), ranks))) +
                " a rank)");

  // A configured level is never lowered.
  config_.optimizer.shard = 2;
  EXPECT_EQ(nearest(of(2, kAll)).text, "it fits as it is configured (" + bytes_text(of(2, kAll)) + " a rank)");
}

TEST_F(Fitting, SingleRankIsOfferedOnlyRecomputation) {
  FitRanks one{.ranks = 1, .ranks_of_a_host = 1, .are = RanksAre::kProcesses, .memory = 0, .planned = {}};
  one.memory = static_cast<double>(planned(0, Keeps::kRecomputed, 512, one));
  EXPECT_EQ(nearest_fit(config_, one).text, "model.recompute = true fits (" + bytes_text(one.memory) + " a rank)");
}

TEST_F(Fitting, ShortensTheLongestStageOfASchedule) {
  config_.data.context.stages = {{.step = 0, .context = 128}, {.step = 5, .context = 512, .batch = 1}};
  Config longest = config_;
  longest.data.batch = 1;
  const NearestFit found = nearest(static_cast<double>(planned(longest, 3, Keeps::kOptimizer, 512, four(0))) * 0.98);
  ASSERT_TRUE(found.found) << found.text;
  ASSERT_EQ(found.context.stages.size(), 1U);
  EXPECT_EQ(found.context.stages[0].batch, 1);
}

TEST_F(Fitting, ExplainsWhyNothingFits) {
  const NearestFit nothing = nearest(1e5);
  EXPECT_FALSE(nothing.found);
  EXPECT_NE(
      nothing.text.find(
          "no optimizer.shard, model.recompute, offload or shorter data.context makes it fit: with optimizer.shard "
          "= 3, model.recompute = true, memory.offload and optimizer.offload even rows of 8 tokens need "),
      std::string::npos)
      << nothing.text;
  EXPECT_NE(nothing.text.find("of which weights, gradients and optimizer are "), std::string::npos) << nothing.text;
  for (const Fit& fit : what_fits(config_, four(1e5)).fits) {
    EXPECT_FALSE(fit.fits);
    EXPECT_EQ(fit.longest, 0);
  }
}

TEST_F(Fitting, RefusesToPlanImpossibleSizes) {
  config_.model.layers = 100000;
  config_.model.dim = 1 << 24;
  config_.model.ffn = 1 << 24;
  EXPECT_THROW(what_fits(config_, four(1e11)), Error);
  EXPECT_FALSE(nearest(1e11).found);
  EXPECT_NE(nearest(1e11).text.find("it needs at least "), std::string::npos) << nearest(1e11).text;
}

// In the contiguous layout the ranks need different numbers of rows from each other.
TEST_F(Fitting, PlansTheRankThatNeedsTheMostMemory) {
  config_.attention.layout = "contiguous";
  config_.attention.schedule = "group-cast";
  config_.model.ffn = 32;
  config_.model.recompute = true;
  const FitTable table = what_fits(config_, four(1e9));
  int64_t most = 0;
  for (const int rank : {0, 1, 2, 3}) {
    FitRanks ranks = four(0);
    ranks.planned = rank;
    most = std::max(most, planned(0, Keeps::kAll, 512, ranks));
  }
  EXPECT_EQ(table.fits[0].bytes.total(), most);
}

// `auto` is what a run would take with this memory: the fastest of what fits, or what takes least. Rows are as long as
// they can be with what takes least.
TEST_F(Fitting, AutoIsWhatARunWouldTakeWithThisMemory) {
  config_.attention.schedule = "auto";
  config_.attention.machine = "h100";
  config_.memory.caches = 0;
  PlanRequest request = check_training(config_, 4)[0].layers.of_rows(0, 2)[0];
  PlanTerms terms = *request.terms;
  terms.memory = 0;
  request.terms = std::move(terms);
  PlanChoice choice = choose_plan(request);
  const auto with = [&](const PlanCandidate& candidate) {
    Config c = config_;
    c.attention.schedule = to_string(candidate.schedule);
    c.attention.within = candidate.within;
    return c;
  };
  const auto need = [&](const PlanCandidate& candidate) {
    int64_t most = 0;
    for (const int rank : {0, 1, 2, 3}) {
      FitRanks ranks = four(0);
      ranks.planned = rank;
      most = std::max(most, planned(with(candidate), 0, Keeps::kAll, 512, ranks));
    }
    return most;
  };
  const auto expect = [&](double memory, const PlanCandidate& candidate, bool leanest) {
    const FitTable table = what_fits(config_, four(memory));
    const Fit& fit = table.fits[0];
    EXPECT_EQ(fit.attention.text, candidate.name()) << memory;
    EXPECT_EQ(fit.attention.leanest, leanest) << memory;
    EXPECT_EQ(fit.bytes.total(), need(candidate)) << memory;
    EXPECT_EQ(fit.fits, !leanest) << memory;
    EXPECT_EQ(fit.longest >= 512, fit.fits) << memory;
    const FitTable of_candidate = what_fits(with(candidate), four(memory));
    EXPECT_EQ(table.traffic[0].attention.total(), of_candidate.traffic[0].attention.total());
    EXPECT_EQ(table.ways[0].attention.text, table.fits[12].attention.text);
    if (!leanest) {
      const std::string bytes = bytes_text(static_cast<double>(need(candidate)));
      EXPECT_EQ(nearest(memory).text, "it fits as it is configured (" + bytes + " a rank)");
    }
  };
  const PlanCandidate fastest = choice.chosen();
  expect(1e9, fastest, false);
  PlanCandidate least = fastest;
  for (const PlanCandidate& candidate : choice.candidates) {
    if (candidate.refused.empty() && need(candidate) < need(least)) least = candidate;
  }
  const auto little = static_cast<double>(need(fastest) - 1);
  ASSERT_LT(need(least), little);
  const std::optional<int64_t> longest = what_fits(config_, four(little)).fits[0].longest;
  EXPECT_EQ(longest, what_fits(with(least), four(little)).fits[0].longest);
  while (need(choice.chosen()) > static_cast<int64_t>(little)) ASSERT_TRUE(choice.refuse("it does not fit"));
  expect(little, choice.chosen(), false);
  expect(static_cast<double>(need(least) - 1), least, true);
}

}  // namespace
}  // namespace annulus::fitting_test
