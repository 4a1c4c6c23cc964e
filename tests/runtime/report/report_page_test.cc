// Tests runtime/report/run_data.h, report_page.h and live_report.h.
#include "runtime/report/report_page.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "common/descriptor.h"
#include "common/error.h"
#include "runtime/report/live_report.h"
#include "runtime/report/run_data.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/report/report_folder.h"

namespace annulus::report_page_test {
namespace {

namespace fs = std::filesystem;

class ReportPageTest : public ReportFolder {
 protected:
  ReportPageTest() {
    write("config.toml", "[run]\nname = \"tiny\"\nsteps = 4\n[model]\nlayers = 2\n");
    write("metrics.jsonl", "{\"step\":1,\"loss\":2.5,\"seconds\":1}\n{\"step\":2,\"loss\":2.25,\"seconds\":2}\n");
  }
  bool notes(const std::string& text) {
    const auto run = run_data(run_);
    for (const auto& note : run["notes"]) {
      if (note.get<std::string>().find(text) != std::string::npos) return true;
    }
    return false;
  }
  std::string state() { return run_data(run_)["state"]["kind"]; }
};

// The data between the tags of its element.
nlohmann::json data_of(const std::string& page) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t begin = page.find(open) + open.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST_F(ReportPageTest, HoldsWhatTheFolderHolds) {
  const nlohmann::json run = data_of(report_page({run_data(run_)}))["runs"][0];
  EXPECT_EQ(run["name"], "tiny-001");
  EXPECT_EQ(run["steps"], 4);
  EXPECT_EQ(run["step"], 2);
  EXPECT_EQ(run["columns"]["loss"]["y"], nlohmann::json({2.5, 2.25}));
  EXPECT_EQ(run["config"], content("config.toml"));
}

TEST_F(ReportPageTest, NoTextOfARunEndsItsElement) {
  const std::string bad = "</script><script>alert(1)</script><!-- &amp; \xff \"'";
  write("logs/rank-0.log", "2026-11-29T10:00:10.000000Z warn a rank 0 [train] " + bad + "\n");
  write("config.toml", "# " + bad + "\n[run]\nsteps = 4\n");
  const std::string page = report_page({run_data(run_)});
  EXPECT_EQ(page.find("alert(1)</script>"), std::string::npos);
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  const nlohmann::json run = data_of(page)["runs"][0];
  EXPECT_EQ(run["log"][0]["message"].get<std::string>().substr(0, 40), bad.substr(0, 40));
}

TEST_F(ReportPageTest, ThePolicyAllowsItsOwnScriptAlone) {
  const std::string page = report_page({run_data(run_)});
  EXPECT_NE(page.find("content=\"default-src 'none'; script-src 'sha256-"), std::string::npos);
  EXPECT_EQ(page.find("unsafe-"), std::string::npos);
  EXPECT_EQ(page.find("src=\""), std::string::npos);
  EXPECT_EQ(page.find("@SCRIPT@"), std::string::npos);
  EXPECT_LT(page.size(), 100'000);
}

TEST_F(ReportPageTest, LongRunsAreThinned) {
  std::string text;
  for (int i = 1; i <= 20000; ++i) {
    text += "{\"step\":" + std::to_string(i) + ",\"loss\":" + std::to_string(5.0 / i) +
            ",\"tokens\":" + std::to_string(10 * i) + ",\"tokens_per_second\":10,\"seconds\":" + std::to_string(i) +
            "}\n";
  }
  write("metrics.jsonl", text);
  const auto run = run_data(run_);
  EXPECT_LE(run["columns"]["loss"]["x"].size(), 802);
  EXPECT_EQ(run["columns"]["loss"]["of"], 20000);
  EXPECT_LE(run["time"]["bars"].size(), 160);
  EXPECT_LT(report_page({run}).size(), 300'000);
}

TEST_F(ReportPageTest, ARunIsShownAsWhatItIs) {
  const std::string log = "2026-11-29T10:00:10.000000Z info a rank 0 [train] device cpu\n2026-11-29T10:00:11.000000Z ";
  EXPECT_EQ(state(), "ended");
  write("logs/rank-0.log", log + "info a rank 0 [train] stopped after step 2 of 4\n");
  EXPECT_EQ(state(), "stopped");
  write("logs/rank-0.log", log + "error a rank 0 [train] disk full\n");
  EXPECT_EQ(state(), "failed");
  EXPECT_EQ(run_data(run_)["state"]["text"], "disk full");
  {
    const Descriptor lock(::open((run_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    ASSERT_EQ(::flock(lock, LOCK_EX), 0);
    EXPECT_EQ(state(), "running");
  }
  write("logs/rank-0.log", log + "info a rank 0 [train] done: 4 steps\n");
  write("config.toml", "[run]\nsteps = 2\n");
  EXPECT_EQ(state(), "complete");
}

TEST_F(ReportPageTest, WhatIsOfAnotherVersionIsSaid) {
  write("metrics.jsonl", "{\"step\":0,\"started\":{\"version\":\"9.9\"}}\n" + content("metrics.jsonl"));
  write("checkpoints/step-00000002/manifest.json", "{\"version\":7,\"step\":2,\"tensors\":[[1]]}");
  write("checkpoints/step-00000004/manifest.json", "{");
  write("evaluation.json", "{\"format\":\"annulus-evaluation-9\"}");
  write("config.toml", "[run\n");
  EXPECT_TRUE(notes("of annulus 9.9"));
  EXPECT_TRUE(notes("step-00000002 is of version 7"));
  EXPECT_TRUE(notes("step-00000004 has no manifest that can be read"));
  EXPECT_TRUE(notes("evaluation.json"));
  EXPECT_TRUE(notes("config.toml is not TOML"));
  const auto checkpoints = run_data(run_)["checkpoints"];
  ASSERT_EQ(checkpoints.size(), 2);
  EXPECT_EQ(checkpoints[0]["step"], 2);
  EXPECT_EQ(checkpoints[1]["step"], 4);
}

TEST_F(ReportPageTest, WithoutMetricsThereIsNoPage) {
  fs::remove(run_ + "/metrics.jsonl");
  expect_error(ErrorKind::kInput, {"metrics.jsonl cannot be read"}, [&] { run_data(run_); });
}

TEST_F(ReportPageTest, ALiveReportEndsWithHowTheRunEnded) {
  { const LiveReport page(run_); }
  EXPECT_EQ(data_of(content("report.html"))["runs"][0]["state"]["kind"], "ended");
  {
    LiveReport page(run_);
    page.failed("[comm] rank 1 is gone");
  }
  const nlohmann::json state = data_of(content("report.html"))["runs"][0]["state"];
  EXPECT_EQ(state["kind"], "failed");
  EXPECT_EQ(state["text"], "[comm] rank 1 is gone");
}

// Each page is whole whenever it is read.
TEST_F(ReportPageTest, ALivePageIsRewrittenWhileTheRunGoesOn) {
  const LiveReport page(run_, {.first = 0.001, .least = 0.001, .share = 1});
  for (int step = 3; step <= 5; ++step) {
    write("metrics.jsonl", content("metrics.jsonl") + "{\"step\":" + std::to_string(step) +
                               ",\"loss\":2,\"seconds\":" + std::to_string(step) + "}\n");
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    nlohmann::json run;
    do {
      std::this_thread::yield();
      if (fs::exists(run_ + "/report.html")) run = data_of(content("report.html"))["runs"][0];
    } while ((run.is_null() || run["step"] != step) && std::chrono::steady_clock::now() < until);
    EXPECT_EQ(run["step"], step);
    EXPECT_EQ(run["state"]["kind"], "running");
    EXPECT_EQ(run["columns"]["loss"]["x"].size(), step);
  }
}

TEST_F(ReportPageTest, ALiveReportOfARunThatLoggedNothingWritesNothing) {
  write("metrics.jsonl", "");
  { const LiveReport page(run_); }
  EXPECT_FALSE(fs::exists(run_ + "/report.html"));
}

}  // namespace
}  // namespace annulus::report_page_test
