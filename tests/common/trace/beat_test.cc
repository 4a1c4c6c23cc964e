// Tests what a rank shows of its progress to the watch of its host.
#include "common/trace/beat.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "common/trace/recorder.h"

namespace annulus::beat_test {
namespace {

class Beat : public testing::Test {
 protected:
  Beat() { set_beat_page(&page_); }
  ~Beat() override { set_beat_page(nullptr); }

  uint64_t own() const { return page_.own; }

  BeatPage page_;
};

TEST_F(Beat, OperationsAreProgressAndSayWhereTheMainThreadStands) {
  EXPECT_EQ(page_.mark, BeatPage::kMark);
  EXPECT_EQ(place_of_beat(page_), "");
  beat_step(1234);
  EXPECT_EQ(place_of_beat(page_), "step 1,234");
  uint64_t before = own();
  {
    const TraceSpan step(TraceKind::kPhase, "step", "1,234");
    const TraceLayer layer(3);
    const TraceSpan forward(TraceKind::kPhase, "attention forward", "step 1,234, attention");
    EXPECT_GT(own(), before);
    const TraceHop hop(2);
    {
      const TraceSpan tiles(TraceKind::kCompute, "tiles");
      EXPECT_EQ(place_of_beat(page_), "step 1,234: attention forward, tiles (step 1,234, attention, layer 3, hop 2)");
      before = own();
      beat();
      EXPECT_EQ(own(), before + 1);
      const uint64_t id = trace_begin(TraceKind::kExchange, "exchange", {}, -1);
      trace_end(id);
      EXPECT_EQ(own(), before + 3);
    }
    EXPECT_EQ(place_of_beat(page_), "step 1,234: attention forward (step 1,234, attention, layer 3)");
  }
  EXPECT_EQ(place_of_beat(page_), "step 1,234");
  EXPECT_EQ(page_.depth, 0u);
}

TEST_F(Beat, IsKeptWhileNothingIsRecorded) {
  set_tracing(false);
  {
    const TraceSpan tiles(TraceKind::kCompute, "tiles");
    EXPECT_EQ(place_of_beat(page_), "tiles");
  }
  set_tracing(true);
}

TEST_F(Beat, TellsItsWaitsApart) {
  {
    const TraceSpan data(TraceKind::kWait, "wait for data");
    EXPECT_TRUE(page_.places[0].waits);
  }
  {
    const TraceSpan tiles(TraceKind::kCompute, "tiles");
    EXPECT_FALSE(page_.places[0].waits);
    const uint64_t before = own();
    {
      const RankWait wait;
      EXPECT_EQ(page_.waits, 1);
    }
    EXPECT_EQ(page_.waits, 0);
    EXPECT_EQ(own(), before + 2) << "a wait that is over is progress";
  }
}

TEST_F(Beat, PhasesAreDeclared) {
  const ExpectProgress expected;
  const LongPhase outer;
  {
    const LongPhase inner;
    EXPECT_EQ(page_.lasting, 2);
  }
  EXPECT_EQ(page_.lasting, 1);
  EXPECT_EQ(page_.expected, 1);
}

TEST_F(Beat, OtherThreadsCountApart) {
  const TraceSpan waits(TraceKind::kWait, "wait for data");
  const uint64_t before = own();
  std::thread([] {
    const TraceSpan reads(TraceKind::kData, "read batch");
    const LongPhase lasts;
    beat();
  }).join();
  EXPECT_EQ(own(), before);
  EXPECT_EQ(page_.others, 3u);
  EXPECT_EQ(page_.lasting, 0);
  EXPECT_EQ(place_of_beat(page_), "wait for data");
}

TEST_F(Beat, KeepsTheOuterOperationsOfManyAndCutsLongNames) {
  const TraceSpan named(TraceKind::kPhase, "a name that is longer than its place", std::string(100, 'x'));
  EXPECT_EQ(place_of_beat(page_), "a name that is longer t (" + std::string(63, 'x') + ")");
  const auto nest = [&](const auto& self, int more) -> void {
    const TraceSpan span(TraceKind::kPhase, "deep");
    if (more > 0) self(self, more - 1);
    EXPECT_NE(place_of_beat(page_).find("deep"), std::string::npos);
  };
  nest(nest, 2 * BeatPage::kDeepest);
  EXPECT_EQ(page_.depth, 1u);
}

TEST(NoBeat, WithoutAPageNothingHappens) {
  beat();
  beat_step(3);
  const LongPhase lasts;
  const TraceSpan span(TraceKind::kPhase, "layer");
}

}  // namespace
}  // namespace annulus::beat_test
