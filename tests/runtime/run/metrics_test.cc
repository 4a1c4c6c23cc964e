// Tests of runtime/run/metrics.h: progress lines and metrics.jsonl.
#include "runtime/run/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/error.h"

namespace annulus::metrics_test {
namespace {

std::string fresh_file(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove(path);
  return path;
}

std::vector<std::string> lines(const std::string& path) {
  std::vector<std::string> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

ProgressReport report(int64_t step) {
  return {.step = step,
          .steps = 600,
          .loss = 2.0794,
          .validation_loss = 3.12 / bits_per_byte(1),
          .tokens_per_second = 8210.4,
          .seconds_left = 250};
}

TEST(Progress, FormatsTheLine) {
  EXPECT_EQ(format_progress(report(20)),
            "step 20/600  loss 2.08  3.00 bits per byte  validation 3.12 bits per byte  8,210 tokens/s  4:10 left");
  EXPECT_EQ(format_progress({.step = 1, .steps = 2, .loss = 0, .tokens_per_second = 10, .utilization = 0.5123}),
            "step 1/2  loss 0.00  0.00 bits per byte  10 tokens/s  MFU 51.2 %");
  EXPECT_EQ(format_progress({.step = 1, .steps = 1500000, .loss = 5.5452}),
            "step 1/1,500,000  loss 5.55  8.00 bits per byte");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(format_progress({.step = 1, .steps = 2, .loss = 0, .tokens_per_second = nan, .seconds_left = INFINITY}),
            "step 1/2  loss 0.00  0.00 bits per byte");
  EXPECT_EQ(format_progress({.step = 1, .steps = 2, .loss = std::copysign(nan, -1.0), .of_bytes = false}),
            "step 1/2  loss nan");
}

TEST(Progress, FormatsDurations) {
  EXPECT_EQ(format_duration(0), "0:00");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(3599), "59:59");
  EXPECT_EQ(format_duration(3700), "1:01:40");
  EXPECT_EQ(format_duration(100 * 3600), "100:00:00");
  EXPECT_EQ(format_duration(-1), "0:00");
}

TEST(Progress, ModeFollowsVariableAndTerminal) {
  EXPECT_EQ(progress_mode(nullptr, true), ProgressMode::kLive);
  EXPECT_EQ(progress_mode(nullptr, false), ProgressMode::kPlain);
  EXPECT_EQ(progress_mode("", false), ProgressMode::kPlain);
  EXPECT_EQ(progress_mode("live", false), ProgressMode::kLive);
  EXPECT_EQ(progress_mode("plain", true), ProgressMode::kPlain);
  EXPECT_EQ(progress_mode("none", true), ProgressMode::kNone);
  EXPECT_THROW(progress_mode("loud", true), Error);
}

TEST(Progress, PlainLinesAreNeverMoreThanTenSecondsApart) {
  std::ostringstream out;
  double now = 0;
  std::vector<double> shown;
  Progress progress(ProgressMode::kPlain, out, [&] { return now; });
  std::string before;
  for (int64_t step = 1; now < 120; ++step) {
    progress.report(report(step));
    if (out.str() != before) shown.push_back(now);
    before = out.str();
    now += 3.5;
  }
  ASSERT_GE(shown.size(), 12u);
  EXPECT_LE(shown.size(), 20u) << "more lines than needed";
  for (size_t i = 1; i < shown.size(); ++i) EXPECT_LE(shown[i] - shown[i - 1], 10.0);
  EXPECT_EQ(out.str().find('\r'), std::string::npos);
}

TEST(Progress, ImportantReportsAreAlwaysShown) {
  std::ostringstream out;
  Progress progress(ProgressMode::kPlain, out, [] { return 0.0; });
  progress.report(report(1));
  progress.report(report(2));
  progress.report(report(3), Progress::Stays::kImportant);
  progress.report(report(4), Progress::Stays::kLogged);  // lines are for a terminal and for the file of metrics
  progress.message("saved");
  const std::string text = out.str();
  EXPECT_EQ(text, format_progress(report(1)) + "\n" + format_progress(report(3)) + "\nsaved\n");
}

std::string live(int64_t step) { return "\r\x1b[?7l" + format_progress(report(step)) + "\x1b[K\x1b[?7h"; }
std::string kept(const std::string& text) { return "\r" + text + "\x1b[K\n"; }

TEST(Progress, LiveLineIsOverwritten) {
  std::ostringstream out;
  double now = 0;
  {
    Progress progress(
        ProgressMode::kLive, out, [&] { return now; }, [] { return 200; });
    progress.report(report(1));
    now += 1;
    progress.report(report(2));
    progress.message("saved");
  }
  EXPECT_EQ(out.str(), live(1) + live(2) + kept("saved") + live(2) + "\n");
}

// What is validated or logged stays above the live line, which begins again with the next report.
TEST(Progress, LinesStayAboveTheLiveLine) {
  std::ostringstream out;
  double now = 0;
  {
    Progress progress(
        ProgressMode::kLive, out, [&] { return now; }, [] { return 200; });
    progress.report(report(1));
    progress.report(report(2), Progress::Stays::kLogged);
    progress.message("saved");
    now += 1;
    progress.report(report(3));
    progress.report(report(4), Progress::Stays::kImportant);
  }
  EXPECT_EQ(out.str(),
            live(1) + kept(format_progress(report(2))) + "saved\n" + live(3) + kept(format_progress(report(4))));
}

TEST(Progress, LiveLineIsDrawnTenTimesASecondAtMost) {
  std::ostringstream out;
  double now = 0;
  std::string expected;
  {
    Progress progress(
        ProgressMode::kLive, out, [&] { return now; }, [] { return 200; });
    for (int64_t step = 0; step < 64; ++step) {
      progress.report(report(step));
      now = static_cast<double>(step + 1) / 64;
    }
    for (const int64_t step : {0, 7, 14, 21, 28, 35, 42, 49, 56, 63}) expected += live(step);
    EXPECT_EQ(out.str(), expected);
    progress.report(report(64));
    EXPECT_EQ(out.str(), expected) << "63 was drawn a 64th of a second ago";
    progress.message("a message");  // below it stands the newest line
    expected += kept("a message") + live(64);
    progress.report(report(65));
  }
  EXPECT_EQ(out.str(), expected + live(65) + "\n") << "the last line is not an old one";
  EXPECT_EQ(out.str().find("\x1b[3"), std::string::npos) << "there are no colors, whatever NO_COLOR is";
}

ProgressReport full_report() {
  return {.step = 20,
          .steps = 600,
          .loss = 2.08,
          .validation_loss = 3.12 / bits_per_byte(1),
          .tokens_per_second = 8210,
          .utilization = 0.512,
          .seconds_left = 250};
}

TEST(Progress, NarrowLinesDropTheLeastImportantParts) {
  const std::string begin = "step 20/600", loss = "  loss 2.08", bits = "  3.00 bits per byte",
                    validation = "  validation 3.12 bits per byte", speed = "  8,210 tokens/s", mfu = "  MFU 51.2 %",
                    left = "  4:10 left";
  const std::string whole = begin + loss + bits + validation + speed + mfu + left;
  const std::string fewer = begin + loss + bits + speed + mfu + left, few = begin + loss + bits + speed + left,
                    least = begin + bits + speed + left;
  for (int columns = 1; columns <= 120; ++columns) {
    const auto room = static_cast<size_t>(columns);
    const std::string expected = whole.size() <= room   ? whole
                                 : fewer.size() <= room ? fewer
                                 : few.size() <= room   ? few
                                                        : least.substr(0, room);
    EXPECT_EQ(format_progress(full_report(), columns), expected) << columns;
  }
  EXPECT_EQ(format_progress(full_report()), whole);
}

// The line is as wide as the terminal currently is, less its last column.
TEST(Progress, LiveLineFitsTheTerminal) {
  std::ostringstream out;
  int columns = 60;
  double now = 0;
  Progress progress(
      ProgressMode::kLive, out, [&] { return now; }, [&] { return columns; });
  for (columns = 120; columns >= 1; --columns) {
    out.str("");
    now += 1;
    progress.report(full_report());
    const std::string line = format_progress(full_report(), std::max(1, columns - 1));
    EXPECT_EQ(out.str(), "\r\x1b[?7l" + line + "\x1b[K\x1b[?7h");
    out.str("");
    progress.report(full_report(), Progress::Stays::kLogged);
    EXPECT_EQ(out.str(), kept(line));
  }
}

TEST(Progress, NoneShowsOnlyMessages) {
  std::ostringstream out;
  Progress progress(ProgressMode::kNone, out);
  progress.report(report(1), Progress::Stays::kImportant);
  progress.message("saved");
  EXPECT_EQ(out.str(), "saved\n");
}

TEST(Metrics, WritesOneObjectPerLine) {
  const std::string path = fresh_file("metrics.jsonl");
  MetricsWriter writer(path);
  writer.write(1, {{"loss", 0.1}, {"tokens", int64_t{1} << 60}, {"lr", 1e-3}});
  writer.write(2, {{"loss", std::numeric_limits<double>::quiet_NaN()}, {"grad_norm", INFINITY}});
  writer.write(3, {{"caches", MetricsWriter::Table{{"programs", {{"bytes", 5}, {"hits", 2}}}, {"maps", {}}}}});
  writer.write(4, {{"caches", MetricsWriter::Table{}}});
  // Each line is flushed, so that the file can be read while the writer has it open.
  const auto text = lines(path);
  ASSERT_EQ(text.size(), 4u);
  EXPECT_EQ(text[0], "{\"step\":1,\"loss\":0.1,\"tokens\":1152921504606846976,\"lr\":0.001}");
  EXPECT_EQ(text[1], "{\"step\":2,\"loss\":null,\"grad_norm\":null}");
  EXPECT_EQ(text[2], R"({"step":3,"caches":{"programs":{"bytes":5,"hits":2},"maps":{}}})");
  EXPECT_EQ(text[3], R"({"step":4,"caches":{}})");
  writer.write(5,
               {{"host", std::string("node\"3")},
                {"seconds", std::vector<double>{0.5, NAN}},
                {"started", MetricsWriter::Facts{{"version", std::string("0.1")}, {"ranks", 2}, {"resumed", false}}}});
  EXPECT_EQ(
      lines(path).at(4),
      R"({"step":5,"host":"node\"3","seconds":[0.5,null],"started":{"version":"0.1","ranks":2,"resumed":false}})");
}

TEST(Metrics, ResumingRemovesLinesAfterTheCheckpoint) {
  const std::string path = fresh_file("resumed.jsonl");
  {
    MetricsWriter writer(path);
    for (int64_t step = 1; step <= 5; ++step) writer.write(step, {{"loss", 1.0}});
  }
  std::ofstream(path, std::ios::app) << "{\"step\":6,\"lo";
  {
    MetricsWriter writer(path, 3);
    writer.write(4, {{"loss", 2.0}});
  }
  const auto text = lines(path);
  ASSERT_EQ(text.size(), 4u);
  EXPECT_EQ(text[2], "{\"step\":3,\"loss\":1.0}");
  EXPECT_EQ(text[3], "{\"step\":4,\"loss\":2.0}");
  MetricsWriter none(fresh_file("none.jsonl"), 3);  // a missing file has nothing to remove
}

TEST(Metrics, RewindingRemovesLinesAfterTheStep) {
  const std::string path = fresh_file("back.jsonl");
  MetricsWriter writer(path);
  for (int64_t step = 1; step <= 5; ++step) writer.write(step, {{"loss", 1.0}});
  writer.remove_after(2);
  writer.write(3, {{"loss", 2.0}});
  const auto text = lines(path);
  ASSERT_EQ(text.size(), 3u);
  EXPECT_EQ(text[1], "{\"step\":2,\"loss\":1.0}");
  EXPECT_EQ(text[2], "{\"step\":3,\"loss\":2.0}");
}

TEST(Metrics, FailedWritesThrow) {
  EXPECT_THROW(MetricsWriter("/nonexistent/metrics.jsonl"), Error);
  MetricsWriter full("/dev/full");
  EXPECT_THROW(full.write(1, {{"loss", 1.0}}), Error);
}

TEST(Metrics, LinesAreWholeAfterAFailedWrite) {
  const std::string path = fresh_file("cut.jsonl");
  MetricsWriter writer(path);
  writer.write(1, {{"loss", 1.0}});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct Restored {
    rlimit limit;
    ~Restored() { setrlimit(RLIMIT_FSIZE, &limit); }
  };
  signal(SIGXFSZ, SIG_IGN);
  {
    const Restored restored{before};
    const rlimit small{std::filesystem::file_size(path) + 5, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    EXPECT_THROW(writer.write(2, {{"loss", 1.0}}), Error);  // after 5 of its bytes
  }
  writer.write(3, {{"loss", 1.0}});
  EXPECT_EQ(lines(path), (std::vector<std::string>{"{\"step\":1,\"loss\":1.0}", "{\"step\":3,\"loss\":1.0}"}));
}

}  // namespace
}  // namespace annulus::metrics_test
