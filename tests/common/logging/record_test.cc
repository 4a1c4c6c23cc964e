// Tests the formats of a record, and the merge of the records of several ranks.
#include "common/logging/record.h"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/text.h"

namespace annulus::record_test {
namespace {

using std::chrono::microseconds;
using Time = std::chrono::system_clock::time_point;

// 2026-11-23T16:34:19Z and some microseconds.
Time at(int64_t micros) { return Time(std::chrono::seconds(1795451659)) + microseconds(micros); }

LogRecord record(int64_t micros, int rank, const std::string& message, LogLevel level = LogLevel::kInfo) {
  return {.time = at(micros), .level = level, .host = "node1", .rank = rank, .module = "train", .message = message};
}

std::vector<std::string> lines(const std::vector<LogRecord>& records) {
  std::vector<std::string> out;
  for (const LogRecord& one : records) {
    out.push_back((one.ranks.empty() ? std::to_string(one.rank) : ranges_text(one.ranks)) + " " + one.message);
  }
  return out;
}

TEST(Record, HasTimeLevelHostAndRank) {
  EXPECT_EQ(file_text(record(123, 2, "the data", LogLevel::kWarn)),
            "2026-11-23T16:34:19.000123Z warn node1 rank 2 [train] the data");
  EXPECT_EQ(file_text({.time = at(999999), .message = "a\nb"}), "2026-11-23T16:34:19.999999Z info - launcher a\n    b");
  LogRecord folded = record(0, 0, "x");
  folded.ranks = {0, 1, 2, 5};
  EXPECT_EQ(file_text(folded), "2026-11-23T16:34:19.000000Z info node1 ranks 0-2, 5 [train] x");
}

TEST(Record, LooksPlainOnATerminal) {
  EXPECT_EQ(plain_text(record(0, 2, "stopped")), "annulus: stopped");
  LogRecord error = record(0, 2, "no text", LogLevel::kError);
  EXPECT_EQ(plain_text(error), "annulus: [train] no text");
  error.of_one = true;
  EXPECT_EQ(plain_text(error), "annulus: rank 2: [train] no text");
  error.module.clear();
  EXPECT_EQ(plain_text(error), "annulus: rank 2: no text");
}

TEST(Record, IsJsonWhateverItsBytes) {
  const std::vector<std::string> messages = {"plain", "\"quoted\" \\ and\nlines\t", "half a character \xc3", "\xff\x01",
                                             ""};
  for (const std::string& message : messages) {
    const std::string text = json_text(record(7, 3, message, LogLevel::kError));
    EXPECT_EQ(text.find('\n'), std::string::npos);
    const nlohmann::json line = nlohmann::json::parse(text);
    EXPECT_EQ(line.at("time"), "2026-11-23T16:34:19.000007Z");
    EXPECT_EQ(line.at("level"), "error");
    EXPECT_EQ(line.at("host"), "node1");
    EXPECT_EQ(line.at("rank"), 3);
    EXPECT_EQ(line.at("module"), "train");
    EXPECT_TRUE(line.at("message").is_string());
  }
  EXPECT_TRUE(nlohmann::json::parse(json_text({.time = at(0)})).at("rank").is_null());
}

TEST(Record, ComesBackFromJson) {
  for (const int rank : {kNoRank, 0, 17}) {
    const LogRecord made = record(123456, rank, "a \"b\"\nc", LogLevel::kDebug);
    const std::optional<LogRecord> read = record_from_json(json_text(made));
    ASSERT_TRUE(read);
    EXPECT_EQ(file_text(*read), file_text(made));
    EXPECT_EQ(read->time, made.time);
  }
  const std::string good = json_text(record(1, 1, "x"));
  for (size_t length = 0; length < good.size(); ++length) EXPECT_FALSE(record_from_json(good.substr(0, length)));
  for (const char* const other : {"7", "[]", "{}", "null", R"({"time":"now","level":"info"})"}) {
    EXPECT_FALSE(record_from_json(other)) << other;
  }
}

TEST(Merged, IsInTheOrderOfTime) {
  const std::vector<LogRecord> records = {record(30, 1, "c"), record(10, 0, "a"), record(20, 2, "b"),
                                          record(20, 0, "after b")};
  EXPECT_EQ(lines(merged(records, std::nullopt)), (std::vector<std::string>{"0 a", "2 b", "0 after b", "1 c"}));
}

TEST(Merged, EndsWithTheCulpritsLines) {
  const std::vector<LogRecord> records = {record(40, 2, "later"), record(10, 2, "before"), record(50, 0, "complaint"),
                                          record(20, 1, "b"), record(60, kNoRank, "exit code 3")};
  EXPECT_EQ(lines(merged(records, 2)),
            (std::vector<std::string>{"1 b", "0 complaint", "-1 exit code 3", "2 before", "2 later"}));
}

TEST(Merged, SaysAWarningOfSeveralRanksOnce) {
  std::vector<LogRecord> records;
  for (const int rank : {3, 0, 1, 2}) records.push_back(record(10 + rank, rank, "slow disk", LogLevel::kWarn));
  records.push_back(record(5, 1, "another", LogLevel::kWarn));
  for (const int rank : {0, 1}) records.push_back(record(50 + rank, rank, "not a warning"));
  EXPECT_EQ(lines(merged(records, std::nullopt)),
            (std::vector<std::string>{"1 another", "0-3 slow disk", "0 not a warning", "1 not a warning"}));
  // A minute later it is said again.
  const int64_t later = std::chrono::microseconds(kFoldTime).count() + 11;
  std::vector<LogRecord> long_after = records;
  for (const int rank : {2, 3}) long_after.push_back(record(later + rank, rank, "slow disk", LogLevel::kWarn));
  EXPECT_EQ(lines(merged(long_after, std::nullopt)).back(), "2-3 slow disk");
  // The records of the rank that failed stay separate, and a rank's second, equal warning is kept.
  records.push_back(record(99, 1, "another", LogLevel::kWarn));
  EXPECT_EQ(lines(merged(records, 3)), (std::vector<std::string>{"1 another", "0-2 slow disk", "0 not a warning",
                                                                 "1 not a warning", "1 another", "3 slow disk"}));
}

}  // namespace
}  // namespace annulus::record_test
