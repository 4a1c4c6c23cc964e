// Tests runtime/report/metrics_file.h, thinning.h and run_log.h.
#include "runtime/report/metrics_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/error.h"
#include "runtime/report/run_log.h"
#include "runtime/report/thinning.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/report/report_folder.h"

namespace annulus::metrics_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

class MetricsFileTest : public ReportFolder {
 protected:
  MetricsFile read(const std::string& text) {
    write("metrics.jsonl", text);
    return read_metrics(run_ + "/metrics.jsonl");
  }
};

TEST_F(MetricsFileTest, NumbersByKeyAndStep) {
  const MetricsFile m = read(
      "{\"step\":1,\"loss\":2.5,\"seconds\":1}\n"
      "{\"step\":2,\"loss\":null,\"seconds\":2}\n"
      "{\"step\":2,\"validation_loss\":3,\"validation_sources\":{\"web\":{\"loss\":4},\"code\":{\"loss\":2}}}\n");
  EXPECT_THAT(m.column("loss").x, ElementsAre(1, 2));
  EXPECT_EQ(m.column("loss").y[0], 2.5);
  EXPECT_TRUE(std::isnan(m.column("loss").y[1]));
  EXPECT_THAT(m.column("validation_loss").x, ElementsAre(2));
  EXPECT_EQ(m.validation_sources.at("web").y[0], 4);
  EXPECT_TRUE(m.column("no such key").x.empty());
  EXPECT_EQ(m.last_step, 2);
  EXPECT_EQ(m.damaged, 0);
}

TEST_F(MetricsFileTest, HalfALineAndOtherLinesAreCounted) {
  const MetricsFile m = read("{\"step\":1,\"loss\":2}\nnothing\n[1]\n{\"step\":\"1\"}\n{\"step\":2,\"lo");
  EXPECT_TRUE(m.half_line);
  EXPECT_EQ(m.lines, 4);
  EXPECT_EQ(m.damaged, 3);
  EXPECT_THAT(m.column("loss").x, ElementsAre(1));
}

TEST_F(MetricsFileTest, WithoutMetricsItSaysWhy) {
  expect_error(ErrorKind::kInput, {"nothing to show yet"}, [&] { read_metrics(run_ + "/metrics.jsonl"); });
  expect_error(ErrorKind::kInput, {"holds no line yet"}, [&] { read(""); });
  expect_error(ErrorKind::kInput, {"holds no line yet"}, [&] { read("{\"step\":1"); });
  expect_error(ErrorKind::kInput, {"none of its 2 lines"}, [&] { read("a\nb\n"); });
}

// Two steps of 100 tokens each in a line, 50 tokens a second.
TEST_F(MetricsFileTest, TimeIsDividedAmongWhatItWentTo) {
  const MetricsFile m = read(
      "{\"step\":2,\"tokens\":200,\"tokens_per_second\":50,\"seconds\":4,\"exposed_communication_seconds\":1,"
      "\"exposed_ring_seconds\":0.5,\"exposed_reduce_seconds\":0.25,\"exposed_gather_seconds\":0,"
      "\"exposed_data_seconds\":0.125}\n"
      "{\"step\":4,\"tokens\":400,\"tokens_per_second\":100,\"seconds\":9}\n");
  ASSERT_EQ(m.intervals.size(), 2);
  EXPECT_EQ(m.intervals[0].begin, 0);
  EXPECT_EQ(m.intervals[0].end, 2);
  // compute, ring, reduce, gather, other, data, planning, offload
  EXPECT_THAT(m.intervals[0].seconds, ElementsAre(2.875, 0.5, 0.25, 0, 0.25, 0.125, 0, 0));
  EXPECT_THAT(m.intervals[1].seconds,
              ElementsAre(0.875, 0.5, 0.25, 0, 0.25, 0.125, 0, 0));  // keys that have not changed
}

TEST_F(MetricsFileTest, ProcessesOfARunAreToldApart) {
  const MetricsFile m = read(
      "{\"step\":0,\"started\":{\"version\":\"1\",\"resumed\":false},\"memory_plan\":{\"weights\":7,\"total\":9}}\n"
      "{\"step\":10,\"tokens\":10,\"tokens_per_second\":1,\"seconds\":10}\n"
      "{\"step\":20,\"tokens\":20,\"tokens_per_second\":1,\"seconds\":20}\n"
      "{\"step\":20,\"started\":{\"version\":\"2\",\"resumed\":true}}\n"
      "{\"step\":30,\"tokens\":30,\"tokens_per_second\":1,\"seconds\":10}\n"
      "{\"step\":40,\"tokens\":40,\"tokens_per_second\":1,\"seconds\":3}\n");  // a process that did not say it had
                                                                               // begun
  EXPECT_EQ(m.starts.size(), 2);
  EXPECT_EQ(m.memory_plan["weights"], 7);
  EXPECT_THAT(m.resumed_at, ElementsAre(20, 30));
  EXPECT_THAT(m.elapsed.y, ElementsAre(10, 20, 30, 33));
}

TEST_F(MetricsFileTest, RewindsRanksCheckpointsAndSlowRanks) {
  const MetricsFile m = read(
      "{\"step\":10,\"tokens\":10,\"tokens_per_second\":1,\"seconds\":10,\"rank_compute_seconds\":[10,20],"
      "\"ranks\":{\"compute_seconds\":{\"least\":10,\"median\":15,\"most\":20,\"most_rank\":1}}}\n"
      "{\"step\":10,\"rewound_from\":17,\"gradient_norm\":99}\n"
      "{\"step\":10,\"checkpoint\":\"step-00000010\",\"checkpoint_seconds\":2}\n"
      "{\"step\":11,\"slow_rank\":1,\"slow_share\":0.2}\n");
  EXPECT_THAT(m.rewinds, ElementsAre(Pair(17, 10)));
  EXPECT_TRUE(m.column("gradient_norm").x.empty());
  ASSERT_EQ(m.rank_seconds.size(), 1);
  EXPECT_THAT(m.rank_seconds[0], ElementsAre(1, 2));  // seconds of a step
  EXPECT_EQ(m.ranks.at("compute_seconds").at("most_rank").y[0], 1);
  EXPECT_EQ(m.checkpoints.at("step-00000010")["checkpoint_seconds"], 2);
  EXPECT_EQ(m.slow_ranks.size(), 1);
}

TEST_F(MetricsFileTest, RowsOfRanksStayFewAndKeepTheirMeans) {
  std::string text;
  for (int step = 1; step <= 2000; ++step) {
    text += "{\"step\":" + std::to_string(step) +
            ",\"tokens\":1,\"tokens_per_second\":1,\"seconds\":" + std::to_string(step) +
            ",\"rank_compute_seconds\":[" + std::to_string(step % 2) + ",3]}\n";
  }
  const MetricsFile m = read(text);
  EXPECT_EQ(m.rank_lines, 2000);
  EXPECT_LE(m.rank_seconds.size(), kMostRankRows);
  EXPECT_GE(m.rank_seconds.size(), kMostRankRows / 2);
  EXPECT_EQ(m.rank_steps.back(), 2000);
  for (const std::vector<double>& row : m.rank_seconds) {
    EXPECT_NEAR(row[0], 0.5, 1e-12);
    EXPECT_NEAR(row[1], 3, 1e-12);
  }
}

TEST(Thinning, KeepsEndsPeaksAndWhatIsNotFinite) {
  Points points;
  for (int i = 0; i < 10000; ++i) points.add(i, std::sin(i));
  points.y[5001] = 50;
  points.y[7003] = -50;
  points.y[2222] = std::numeric_limits<double>::quiet_NaN();
  const Points few = thinned(points, 100);
  EXPECT_LE(few.x.size(), 203);
  EXPECT_EQ(few.x.front(), 0);
  EXPECT_EQ(few.x.back(), 9999);
  const auto has = [&](double x) { return std::find(few.x.begin(), few.x.end(), x) != few.x.end(); };
  EXPECT_TRUE(has(5001) && has(7003) && has(2222));
  EXPECT_TRUE(std::is_sorted(few.x.begin(), few.x.end()));
  EXPECT_EQ(thinned(few, 200).x, few.x);
}

TEST(Thinning, JoinedIntervalsKeepTheirSums) {
  std::vector<Interval> many;
  for (int i = 0; i < 1000; ++i) many.push_back({.begin = i * 2.0, .end = i * 2.0 + 2, .seconds = {1, 0.5}});
  many[600].begin += 1;  // another process began at another step
  const std::vector<Interval> few = joined(many, 10);
  EXPECT_LE(few.size(), 12);
  double sum = 0, at = 0;
  for (const Interval& one : few) {
    EXPECT_TRUE(one.begin == at || one.begin == many[600].begin);
    at = one.end;
    sum += one.seconds[0];
  }
  EXPECT_EQ(sum, 1000);
}

class RunLogTest : public ReportFolder {
 protected:
  static std::string line(int second, const std::string& rest) {
    return "2026-11-29T10:00:" + std::to_string(10 + second) + ".000000Z " + rest + "\n";
  }
};

TEST_F(RunLogTest, ReadsWarningsOfAllRanksOnce) {
  write("logs/rank-0.log", line(1, "info a rank 0 [train] device cpu (x)  ranks 2") +
                               line(2, "warn a rank 0 [train] slow disk") + "    and more\n" +
                               line(4, "warn a rank 0 [train] slow disk\n    and more"));
  write("logs/rank-1.log",
        line(3, "warn b rank 1 [train] slow disk\n    and more") + "no record\n" +
            "{\"time\":\"2026-11-29T10:00:15.000000Z\",\"level\":\"error\",\"host\":\"b\",\"rank\":1,"
            "\"module\":\"comm\",\"message\":\"gone\"}\n");
  const RunLog log = read_run_log(run_);
  ASSERT_EQ(log.entries.size(), 2);
  EXPECT_EQ(log.entries[0].record.message, "slow disk\nand more");
  EXPECT_EQ(log.entries[0].times, 3);
  EXPECT_THAT(log.entries[0].record.ranks, ElementsAre(0, 1));
  EXPECT_EQ(log.entries[0].last.substr(11, 8), "10:00:14");
  EXPECT_EQ(log.entries[1].record.module, "comm");
  EXPECT_EQ(log.end, RunLog::End::kFailed);
  EXPECT_EQ(log.end_text, "gone");
}

TEST_F(RunLogTest, TellsHowTheNewestProcessEnded) {
  const std::string begin = "info a rank 0 [train] device cpu (x)";
  write("logs/rank-0.log", line(1, begin) + line(2, "error a rank 0 [train] disk full"));
  EXPECT_EQ(read_run_log(run_).end, RunLog::End::kFailed);
  write("logs/rank-0.log", line(1, begin) + line(2, "error a rank 0 [train] disk full") + line(3, begin));
  EXPECT_EQ(read_run_log(run_).end, RunLog::End::kUnknown);
  write("logs/rank-0.log", line(3, begin) + line(4, "info a rank 0 [train] stopped after step 7 of 9"));
  EXPECT_EQ(read_run_log(run_).end, RunLog::End::kStopped);
  write("logs/rank-0.log", line(3, begin) + line(4, "info a rank 0 [train] done: 9 steps in 0:01"));
  const RunLog log = read_run_log(run_);
  EXPECT_EQ(log.end, RunLog::End::kDone);
  ASSERT_EQ(log.begins.size(), 1);
  EXPECT_EQ(log.begins[0].message, "device cpu (x)");
}

TEST_F(RunLogTest, RecordsThatDifferInNumbersAreOneEntry) {
  write("logs/rank-0.log",
        line(1, "warn a rank 0 [train] step 9: left out") + line(2, "warn a rank 0 [train] step 10: left out"));
  const RunLog log = read_run_log(run_);
  ASSERT_EQ(log.entries.size(), 1);
  EXPECT_EQ(log.entries[0].record.message, "step 9: left out");
  EXPECT_EQ(log.entries[0].last_message, "step 10: left out");
  EXPECT_EQ(log.entries[0].times, 2);
}

// A rank that is killed logs nothing, but its launcher does.
TEST_F(RunLogTest, OfAKilledRankTheLauncherTells) {
  write("logs/rank-0.log", line(1, "info a rank 0 [train] device cpu (x)"));
  const auto job = [&](const std::string& name, const std::string& folder, const std::string& end) {
    write("../logs/" + name + "/job.log", line(1, "info a rank 0 [train] data x  run folder " + folder) + end);
  };
  job("20261129-1", "runs/tiny-001", line(2, "error a launcher rank 3 was ended by signal 9 (Killed)"));
  job("20261129-2", "runs/tiny-001  resumed after step 7",
      line(2, "error a launcher rank 1 was ended by signal 9 (Killed)") + line(3, "error a launcher exit code 137"));
  job("20261129-3", "runs/tiny-0012", line(2, "error a launcher of another run"));
  const RunLog log = read_run_log(run_);
  EXPECT_EQ(log.end, RunLog::End::kFailed);
  EXPECT_EQ(log.end_text, "rank 1 was ended by signal 9 (Killed)");
  EXPECT_EQ(log.entries.size(), 2);
}

TEST_F(RunLogTest, OfALargeFileItReadsTheEnd) {
  std::string text;
  for (int i = 0; i < 30000; ++i) {
    std::string name;
    for (int n = i; n > 0; n /= 26) name += static_cast<char>('a' + n % 26);
    text += line(1, "warn a rank 0 [train] the file " + name);
  }
  text += line(2, "warn a rank 0 [train] the last one");
  write("logs/rank-0.log", text);
  const RunLog log = read_run_log(run_);
  EXPECT_TRUE(log.cut);
  EXPECT_EQ(log.entries.size(), 200);
  EXPECT_GT(log.left_out, 0);
  EXPECT_EQ(log.entries.back().record.message, "the last one");
}

}  // namespace
}  // namespace annulus::metrics_file_test
