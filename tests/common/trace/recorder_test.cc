// What threads record, in rings and in windows, and what is kept of it.
#include "common/trace/recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace annulus::recorder_test {
namespace {

const TracedThread* thread_of(const TraceRecord& record, const std::string& name) {
  for (const TracedThread& thread : record.threads) {
    if (thread.name == name) return &thread;
  }
  return nullptr;
}

// Each test has a rank of its own, because rings stay.
TEST(Recorder, SpansNestAndKnowWhereTheyWere) {
  constexpr int kRank = 101;
  const TraceThread thread(kRank, kMainThread);
  TraceWindow window(kRank);
  {
    const TraceLayer layer(3);
    const TraceSpan outer(TraceKind::kPhase, "layer forward");
    {
      const TraceHop hop(2);
      const TraceSpan inner(TraceKind::kCompute, "tiles", "a call", 7);
    }
  }
  const TraceRecord record = window.finish();
  ASSERT_EQ(record.threads.size(), 1U);
  EXPECT_EQ(record.threads[0].number, 1);
  const std::vector<TraceEvent>& events = record.threads[0].events;  // in the order in which they ended
  ASSERT_EQ(events.size(), 2U);
  EXPECT_STREQ(events[0].name, "tiles");
  EXPECT_STREQ(events[0].detail, "a call");
  EXPECT_EQ(events[0].bytes, 7);
  EXPECT_EQ(events[0].layer, 3);
  EXPECT_EQ(events[0].hop, 2);
  EXPECT_EQ(events[1].layer, 3);
  EXPECT_EQ(events[1].hop, -1);
  EXPECT_LE(events[1].begin, events[0].begin);
  EXPECT_LE(events[0].begin, events[0].end);
  EXPECT_LE(events[0].end, events[1].end);
}

TEST(Recorder, TheRingHasTheLastRecordsAlsoOfWhatHasNotEnded) {
  constexpr int kRank = 102;
  const TraceThread thread(kRank, kMainThread);
  const TraceSpan outer(TraceKind::kPhase, "outer");
  for (size_t i = 0; i < 3 * kTraceRing; ++i) {
    const TraceSpan span(TraceKind::kCompute, "many", {}, static_cast<int64_t>(i));
  }
  const TraceSpan waiting(TraceKind::kWait, "wait");
  const TraceRecord record = last_trace_records(kRank);
  ASSERT_EQ(record.threads.size(), 1U);
  const std::vector<TraceEvent>& events = record.threads[0].events;
  ASSERT_GE(events.size(), kTraceRing - 1);
  ASSERT_LE(events.size(), kTraceRing);
  EXPECT_STREQ(events.back().name, "wait");
  EXPECT_EQ(events.back().end, TraceEvent::kOpen);
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    EXPECT_EQ(events[i].bytes, static_cast<int64_t>(3 * kTraceRing - (events.size() - 1) + i));
    EXPECT_GE(events[i].end, events[i].begin);
  }
}

TEST(Recorder, ASpanThatOutlivesTheRingIsKeptWhenItEnds) {
  constexpr int kRank = 103;
  const TraceThread thread(kRank, kMainThread);
  {
    const TraceSpan outer(TraceKind::kPhase, "outer");
    for (size_t i = 0; i < kTraceRing + 5; ++i) const TraceSpan span(TraceKind::kCompute, "many");
  }
  const TraceEvent& last = last_trace_records(kRank).threads[0].events.back();
  EXPECT_STREQ(last.name, "outer");
  EXPECT_NE(last.end, TraceEvent::kOpen);
}

TEST(Recorder, AWindowKeepsMoreThanTheRingAndCountsWhatItDrops) {
  constexpr int kRank = 104;
  const TraceThread thread(kRank, kMainThread);
  const size_t most = 2 * kTraceRing;
  TraceWindow window(kRank, most);
  for (size_t i = 0; i < most + 3; ++i) const TraceSpan span(TraceKind::kCompute, "many");
  const TraceRecord record = window.finish();
  EXPECT_EQ(record.threads[0].events.size(), most);
  EXPECT_EQ(record.dropped, 3);
  const TraceSpan after(TraceKind::kCompute, "after");
  TraceWindow next(kRank);
  EXPECT_TRUE(next.finish().threads.empty());
}

TEST(Recorder, ThreadsOfARankAreApartFromThoseOfOthers) {
  constexpr int kRank = 105, kOther = 106;
  const TraceThread thread(kRank, kMainThread);
  TraceWindow window(kRank);
  std::thread reader([rank = trace_rank()] {
    const TraceThread named(rank, "reader");
    const TraceSpan span(TraceKind::kData, "read");
  });
  reader.join();
  std::thread other([] {
    const TraceThread named(kOther, kMainThread);
    const TraceSpan span(TraceKind::kData, "foreign");
  });
  other.join();
  { const TraceSpan span(TraceKind::kCompute, "own"); }
  const TraceRecord record = window.finish();
  ASSERT_EQ(record.threads.size(), 2U);
  ASSERT_NE(thread_of(record, "main"), nullptr);
  ASSERT_NE(thread_of(record, "reader"), nullptr);
  EXPECT_NE(thread_of(record, "main")->number, thread_of(record, "reader")->number);
  EXPECT_STREQ(thread_of(record, "reader")->events[0].name, "read");
}

TEST(Recorder, AThreadTakesTheRingThatAnEarlierOneOfItsNameHasLeft) {
  constexpr int kRank = 107;
  for (int i = 0; i < 3; ++i) {
    std::thread([] {
      const TraceThread named(kRank, "reader");
      const TraceSpan span(TraceKind::kData, "read");
    }).join();
  }
  const TraceRecord record = last_trace_records(kRank);
  ASSERT_EQ(record.threads.size(), 1U);
  EXPECT_EQ(record.threads[0].events.size(), 3U);
}

// A reader never sees a record that is half of one and half of another.
TEST(Recorder, RecordsAreReadWholeWhileTheyAreWritten) {
  constexpr int kRank = 108;
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    const TraceThread named(kRank, kMainThread);
    for (int64_t i = 0; !stop; ++i) {
      const TraceLayer layer(i % 1000);
      const TraceHop hop(i % 1000);
      const TraceSpan span(TraceKind::kData, "read", {}, i);
    }
  });
  int64_t seen = 0;
  for (int turn = 0; turn < 200 || seen == 0; ++turn) {
    const TraceRecord record = last_trace_records(kRank);
    if (record.threads.empty()) continue;
    const std::vector<TraceEvent>& events = record.threads[0].events;
    for (size_t i = 0; i < events.size(); ++i) {
      ASSERT_STREQ(events[i].name, "read");
      ASSERT_EQ(events[i].layer, events[i].bytes % 1000);
      ASSERT_EQ(events[i].hop, events[i].bytes % 1000);
      ASSERT_EQ(events[i].bytes, events[0].bytes + static_cast<int64_t>(i));
    }
    seen += static_cast<int64_t>(events.size());
  }
  stop = true;
  writer.join();
  EXPECT_GT(seen, 0);
}

TEST(Recorder, RecordsNothingWhileItIsOff) {
  constexpr int kRank = 109;
  const TraceThread thread(kRank, kMainThread);
  set_tracing(false);
  { const TraceSpan span(TraceKind::kCompute, "off"); }
  EXPECT_EQ(trace_begin(TraceKind::kExchange, "exchange", {}, -1), 0U);
  trace_message(TraceKind::kSend, 1, 2, 0, 4);
  trace_end(0);
  set_tracing(true);
  EXPECT_TRUE(last_trace_records(kRank).threads.empty());
}

}  // namespace
}  // namespace annulus::recorder_test
