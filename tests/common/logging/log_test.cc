// Tests levels, where records go, and that log files are bounded in size and complete.
#include "common/logging/log.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/logging/log_setup.h"
#include "common/logging/logger.h"
#include "tests/common/expect_error.h"

namespace annulus::log_test {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

class OpenLogFile {
 public:
  OpenLogFile(const std::string& path, int64_t bytes) { open_log_file(path, bytes); }
  ~OpenLogFile() { open_log_file("", 0); }
  OpenLogFile(const OpenLogFile&) = delete;
  OpenLogFile& operator=(const OpenLogFile&) = delete;
};

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/log-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    set_log_settings({});
    set_log_place("node1", 2, 4);
    set_log_console([this](const LogRecord& record, bool shown) {
      taken_.push_back(record);
      if (shown) shown_.push_back(plain_text(record));
    });
    install_logger();
  }
  void TearDown() override {
    set_log_backend(nullptr);
    set_log_console(nullptr);
    fs::remove_all(folder_);
  }
  std::string file() const { return folder_ / "logs" / "rank-2.log"; }

  fs::path folder_;
  std::vector<LogRecord> taken_;
  std::vector<std::string> shown_;
};

TEST_F(LogTest, LeavesOutWhatIsBelowTheLevel) {
  const OpenLogFile open(file(), 1 << 20);
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarn, LogLevel::kError}) {
    taken_.clear();
    set_log_settings({.level = level});
    log_debug("module", "a");
    log_info("module", "b");
    log_warn("module", "c");
    log_error("module", "d");
    EXPECT_EQ(taken_.size(), 4 - static_cast<size_t>(level));
    EXPECT_TRUE(log_enabled(level));
  }
  EXPECT_FALSE(log_enabled(LogLevel::kWarn));
  EXPECT_EQ(lines_of(file()).size(), 4 + 3 + 2 + 1);
}

TEST_F(LogTest, GivesARecordItsPlace) {
  log_warn("train", "the data");
  ASSERT_EQ(taken_.size(), 1);
  EXPECT_EQ(taken_[0].host, "node1");
  EXPECT_EQ(taken_[0].rank, 2);
  EXPECT_EQ(taken_[0].module, "train");
  EXPECT_EQ(taken_[0].message, "the data");
  log_error(Error(ErrorKind::kInput, "data", "no file"));
  log_error(std::runtime_error("other"), 3);
  log_error_for_all("comm", "too few ranks");
  set_log_place("node1", 0, 1);
  log_error(Error(ErrorKind::kInput, "data", "no file"));
  EXPECT_EQ(shown_,
            (std::vector<std::string>{"annulus: the data", "annulus: rank 2: [data] no file", "annulus: rank 3: other",
                                      "annulus: [comm] too few ranks", "annulus: [data] no file"}));
}

TEST_F(LogTest, WarnsOnceForAllRanks) {
  log_warn_once_per_job("train", "of rank 2");
  for (const int rank : {0, 1, 3}) {
    set_log_place("node1", rank, 4);
    log_warn_once_per_job("train", "of rank " + std::to_string(rank));
  }
  EXPECT_EQ(shown_, std::vector<std::string>{"annulus: of rank 0"});
}

TEST_F(LogTest, WritesWhatIsNotShownToTheFile) {
  log_info("launcher", "early");
  const OpenLogFile open(file(), 1 << 20);
  log_unshown(LogLevel::kError, "train", "the launcher says it");
  log_unshown(LogLevel::kDebug, "train", "below the level");
  EXPECT_EQ(shown_, std::vector<std::string>{"annulus: early"});
  const std::vector<std::string> lines = lines_of(file());
  ASSERT_EQ(lines.size(), 2);
  EXPECT_NE(lines[0].find(" info node1 rank 2 [launcher] early"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find(" error node1 rank 2 [train] the launcher says it"), std::string::npos) << lines[1];
}

TEST_F(LogTest, HandsOverWhatCameEarly) {
  log_info("launcher", "early");
  EXPECT_EQ(take_early_records().size(), 1);
  log_info("launcher", "later");
  EXPECT_TRUE(take_early_records().empty());
}

TEST_F(LogTest, KeepsAMebibyteOfWhatCameEarly) {
  for (int i = 0; i < 100; ++i) log_info("launcher", std::string(32 << 10, 'x'));
  const size_t kept = take_early_records().size();
  EXPECT_GT(kept, 20);
  EXPECT_LT(kept, 33);
}

// A thread is stuck while it logs, as with a launcher that no longer reads.
TEST_F(LogTest, HasLastWordsWhileAThreadIsStuckInTheLog) {
  std::promise<void> stuck, go_on;
  set_log_console([&](const LogRecord&, bool) {
    stuck.set_value();
    go_on.get_future().wait();
  });
  std::thread thread([] { log_info("train", "stuck"); });
  stuck.get_future().wait();
  for (const bool json : {false, true}) {
    set_log_settings({.json = json});
    ::testing::internal::CaptureStderr();
    log_last_words(LogLevel::kError, "comm", "MPI is stuck", {.rank = 3});
    const std::string said = ::testing::internal::GetCapturedStderr();
    if (json) {
      const nlohmann::json line = nlohmann::json::parse(said);
      EXPECT_EQ(line.at("message"), "MPI is stuck");
      EXPECT_EQ(line.at("host"), "node1");
      EXPECT_EQ(line.at("rank"), 3);
    } else {
      EXPECT_EQ(said, "annulus: rank 3: [comm] MPI is stuck\n");
    }
  }
  go_on.set_value();
  thread.join();
}

TEST_F(LogTest, WritesLastWordsToTheFile) {
  const OpenLogFile open(file(), 1 << 20);
  log_last_words(LogLevel::kError, "comm", "MPI is stuck");
  log_last_words(LogLevel::kError, "comm", "ranks are missing", {.of_all = true});
  EXPECT_EQ(shown_,
            (std::vector<std::string>{"annulus: rank 2: [comm] MPI is stuck", "annulus: [comm] ranks are missing"}));
  EXPECT_EQ(lines_of(file()).size(), 2);
}

TEST_F(LogTest, WritesJsonOnRequest) {
  set_log_settings({.json = true});
  const OpenLogFile open(file(), 1 << 20);
  log_info("train", "a \"b\"\nc");
  log_warn("train", "half \xc3");
  const std::vector<std::string> lines = lines_of(file());
  ASSERT_EQ(lines.size(), 2);
  EXPECT_EQ(nlohmann::json::parse(lines[0]).at("message"), "a \"b\"\nc");
  EXPECT_EQ(nlohmann::json::parse(lines[1]).at("level"), "warn");
}

TEST_F(LogTest, BoundsItsFiles) {
  constexpr int64_t kBytes = 4000;
  constexpr int kRecords = 500;
  {
    const OpenLogFile open(file(), kBytes);
    for (int i = 0; i < kRecords; ++i) log_info("train", "record " + std::to_string(i));
  }
  const fs::path older = folder_ / "logs" / "rank-2.1.log";
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder_ / "logs")) {
    ++files;
    EXPECT_LE(entry.file_size(), static_cast<size_t>(kBytes)) << entry.path();
  }
  EXPECT_EQ(files, 2);
  // The newest records are there, without a gap.
  std::vector<std::string> kept = lines_of(older);
  const size_t in_older = kept.size();
  for (const std::string& line : lines_of(file())) kept.push_back(line);
  ASSERT_GT(in_older, 0);
  ASSERT_GT(kept.size(), in_older);
  for (size_t i = 0; i < kept.size(); ++i) {
    const std::string end = "record " + std::to_string(kRecords - kept.size() + i);
    EXPECT_TRUE(kept[i].ends_with(end)) << kept[i] << " " << end;
  }
  // A file that is opened again is appended to.
  const size_t before = lines_of(file()).size();
  {
    const OpenLogFile open(file(), 1 << 20);
    log_info("train", "resumed");
  }
  EXPECT_EQ(lines_of(file()).size(), before + 1);
}

TEST_F(LogTest, LosesNothingOfAKilledProcess) {
  constexpr int kRecords = 200;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    open_log_file(file(), 1 << 20);
    for (int i = 0; i < kRecords; ++i) log_info("train", "record " + std::to_string(i));
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  const std::vector<std::string> lines = lines_of(file());
  ASSERT_EQ(lines.size(), kRecords);
  EXPECT_TRUE(lines.back().ends_with("record 199"));
}

TEST_F(LogTest, IsWholeLineByLineFromSeveralThreads) {
  const OpenLogFile open(file(), 1 << 20);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) log_info("train", "of a thread");
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> lines = lines_of(file());
  EXPECT_EQ(lines.size(), 400);
  for (const std::string& line : lines) EXPECT_TRUE(line.ends_with(" info node1 rank 2 [train] of a thread")) << line;
}

TEST_F(LogTest, DoesWithoutAFileThatCannotBeWritten) {
  std::ofstream(folder_ / "logs") << "in the way";
  const OpenLogFile open(file(), 1 << 20);
  log_info("train", "goes on");
  ASSERT_EQ(shown_.size(), 2);
  EXPECT_NE(shown_[0].find("this rank has no log file: "), std::string::npos) << shown_[0];
  EXPECT_EQ(shown_[1], "annulus: goes on");
}

TEST_F(LogTest, TellsOnceOfLinesThatAreLost) {
  fs::create_directory(folder_ / "logs");
  fs::create_symlink("/dev/full", file());
  const OpenLogFile open(file(), 1 << 20);
  for (int i = 0; i < 3; ++i) log_info("train", "more");
  const auto is_lost = [](const std::string& line) {
    return line.find("lines are missing in the log file") != line.npos;
  };
  EXPECT_EQ(std::count_if(shown_.begin(), shown_.end(), is_lost), 1);
  EXPECT_EQ(shown_.size(), 4);
}

TEST(LogSettings, AreReadAndRefused) {
  EXPECT_EQ(parse_log_settings("warn", "X"), (LogSettings{.level = LogLevel::kWarn}));
  EXPECT_EQ(parse_log_settings("json", "X"), (LogSettings{.json = true}));
  EXPECT_EQ(parse_log_settings("debug,json", "X"), (LogSettings{.level = LogLevel::kDebug, .json = true}));
  EXPECT_EQ(parse_log_settings("json", "X", {.level = LogLevel::kError}), (LogSettings{LogLevel::kError, true}));
  for (const LogSettings& settings : {LogSettings{}, LogSettings{LogLevel::kError, true}}) {
    EXPECT_EQ(parse_log_settings(log_settings_text(settings), "X"), settings);
  }
  for (const std::string wrong : {"wran", "warn,jso", "", "warn,"}) {
    expect_error(ErrorKind::kUsage, {"ANNULUS_LOG"}, [&] { parse_log_settings(wrong, "ANNULUS_LOG"); });
  }
  expect_error(ErrorKind::kUsage, {"did you mean \"warn\""}, [] { parse_log_level("wran", "--log-level"); });
}

}  // namespace
}  // namespace annulus::log_test
