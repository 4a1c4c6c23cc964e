// Tests the file with all records of a job, and the removal of old log folders.
#include "launcher/launch/job_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/logging/record.h"
#include "launcher/launch/log_folder.h"

namespace annulus::job_log_test {
namespace {

namespace fs = std::filesystem;

class Folder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/logs-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  void make(const std::string& name, const std::vector<std::string>& files) const {
    fs::create_directories(folder_ / name);
    for (const std::string& file : files) std::ofstream(folder_ / name / file) << "x";
  }
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_)) found.insert(entry.path().filename());
    return found;
  }

  fs::path folder_;
};

using JobLogTest = Folder;
using LogFolderTest = Folder;

LogRecord record(int second, int rank, const std::string& message, LogLevel level = LogLevel::kInfo) {
  return {.time = std::chrono::system_clock::time_point(std::chrono::seconds(1795451600 + second)),
          .level = level,
          .rank = rank,
          .message = message};
}

// Returns the last word of each line, which is the message.
std::vector<std::string> messages_of(const fs::path& file) {
  std::ifstream stream(file);
  std::vector<std::string> found;
  for (std::string line; std::getline(stream, line);) found.push_back(line.substr(line.rfind(' ') + 1));
  return found;
}

TEST_F(JobLogTest, HasEveryRecordAtOnceAndInOrderAtTheEnd) {
  JobLog log(folder_, /*json=*/false);
  log.add(record(3, 1, "c"));
  log.add(record(1, 0, "a"));
  log.add(record(2, 2, "b"));
  EXPECT_EQ(messages_of(folder_ / "job.log"), (std::vector<std::string>{"c", "a", "b"}));
  log.merge(1);
  EXPECT_EQ(messages_of(folder_ / "job.log"), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(log.lost(), "");
}

TEST_F(JobLogTest, KeepsWhatIsMoreThanMemoryMayHold) {
  constexpr size_t kMost = 1000;
  JobLog log(folder_, /*json=*/false, kMost);
  std::vector<std::string> all;
  for (int i = 0; i < 100; ++i) {
    const int second = i % 2 == 0 ? i + 1 : i - 1;  // every second record arrives too early
    all.push_back("m" + std::to_string(second));
    log.add(record(second, 0, all.back()));
  }
  log.merge(std::nullopt);
  std::vector<std::string> found = messages_of(folder_ / "job.log");
  ASSERT_EQ(found.size(), all.size());
  EXPECT_EQ(found.front(), "m1");  // in the order of arrival
  EXPECT_EQ(found[98], "m98");
  EXPECT_EQ(found[99], "m99");
  std::sort(found.begin(), found.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(found, all);
}

TEST_F(JobLogTest, TakesAWarningOfAnotherRankForNoNews) {
  JobLog log(folder_, /*json=*/false);
  EXPECT_TRUE(log.is_news(record(0, 1, "slow", LogLevel::kWarn)));
  EXPECT_FALSE(log.is_news(record(0, 0, "slow", LogLevel::kWarn)));
  EXPECT_TRUE(log.is_news(record(0, 1, "slow", LogLevel::kWarn)));  // the same rank again
  EXPECT_TRUE(log.is_news(record(0, 0, "slow", LogLevel::kError)));
  EXPECT_TRUE(log.is_news(record(0, 0, "other", LogLevel::kWarn)));
  for (const int rank : {0, 1}) EXPECT_TRUE(log.is_news(record(0, rank, "said")));
}

TEST_F(JobLogTest, TakesAnOldWarningForNews) {
  JobLog log(folder_, /*json=*/false);
  EXPECT_TRUE(log.is_news(record(0, 1, "slow", LogLevel::kWarn)));
  EXPECT_FALSE(log.is_news(record(60, 0, "slow", LogLevel::kWarn)));
  EXPECT_TRUE(log.is_news(record(61, 0, "slow", LogLevel::kWarn)));
  EXPECT_FALSE(log.is_news(record(62, 1, "slow", LogLevel::kWarn)));
}

TEST_F(JobLogTest, StaysAsItWasIfItIsShorterThanWhatWasWritten) {
  JobLog log(folder_, /*json=*/false, /*most=*/500);
  for (int i = 0; i < 20; ++i) log.add(record(i, 0, "m" + std::to_string(i)));
  fs::resize_file(folder_ / "job.log", 10);
  log.merge(std::nullopt);
  EXPECT_EQ(fs::file_size(folder_ / "job.log"), 10);
  EXPECT_EQ(names(), std::set<std::string>{"job.log"});
}

TEST_F(LogFolderTest, IsOfOneJobAlone) {
  const std::string wanted = folder_ / "mine";
  const LogFolder first(wanted), second(wanted);
  EXPECT_EQ(first.path(), wanted);
  EXPECT_EQ(fs::path(second.path()).parent_path(), fs::path(wanted));
  for (const LogFolder* const folder : {&first, &second}) EXPECT_TRUE(fs::exists(folder->path() + "/launch.log"));
}

TEST_F(LogFolderTest, KeepsTheNewestOfItsOwn) {
  // A launcher that was killed while it sorted job.log has left the temporary file.
  const std::vector<std::string> ours = {"launch.log",
                                         "mpirun.log",
                                         "job.log",
                                         "job.log.tmp-77",
                                         "rank-0.log",
                                         "rank-17.log",
                                         "last-operations-rank-17.json"};
  for (int day = 1; day <= 5; ++day) make("2026010" + std::to_string(day) + "-120000-77", ours);
  make("20250101-120000-1", {"launch.log", "rank-0.log", "rank-0.log.txt"});
  make("20250102-120000-1", {"rank-0.log"});
  make("20250103-120000-1", {"launch.log"});
  fs::create_directory(folder_ / "20250103-120000-1" / "rank-0.log");
  make("other", ours);
  fs::create_directory_symlink(folder_ / "other", folder_ / "20250104-120000-1");
  EXPECT_EQ(prune_log_folders(folder_, 0), 0);
  EXPECT_EQ(prune_log_folders(folder_, 100), 0);
  EXPECT_EQ(prune_log_folders(folder_, 2), 3);
  EXPECT_EQ(names(), (std::set<std::string>{"20260104-120000-77", "20260105-120000-77", "20250101-120000-1",
                                            "20250102-120000-1", "20250103-120000-1", "20250104-120000-1", "other"}));
  EXPECT_TRUE(fs::exists(folder_ / "other" / "rank-0.log"));
  EXPECT_TRUE(fs::exists(folder_ / "20250101-120000-1" / "rank-0.log"));
  EXPECT_EQ(prune_log_folders(folder_ / "nothing", 1), 0);
}

TEST_F(LogFolderTest, IsNotRemovedWhileItsJobRuns) {
  make("20260101-120000-1", {"launch.log", "rank-0.log"});
  make("20260102-120000-1", {"launch.log"});
  {
    const LogFolder live((folder_ / "20260101-120000-2").string());
    std::ofstream(live.path() + "/rank-0.log") << "x";
    EXPECT_EQ(prune_log_folders(folder_, 1), 1);
    EXPECT_EQ(names(), (std::set<std::string>{"20260101-120000-2", "20260102-120000-1"}));
  }
  EXPECT_EQ(prune_log_folders(folder_, 1), 1);
  EXPECT_EQ(names(), std::set<std::string>{"20260102-120000-1"});
}

}  // namespace
}  // namespace annulus::job_log_test
