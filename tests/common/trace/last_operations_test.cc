// The file with a rank's last operations.
#include "common/trace/last_operations.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/trace/recorder.h"

namespace annulus::last_operations_test {
namespace {

class LastOperations : public testing::Test {
 protected:
  ~LastOperations() override { set_last_operations_folder(""); }
  const std::string folder_ = testing::TempDir() + "/last_operations";
};

TEST_F(LastOperations, AreSavedWithWhatHasNotEnded) {
  std::filesystem::create_directories(folder_);
  set_last_operations_folder(folder_);
  const TraceThread thread(201, kMainThread);
  const TraceSpan span(TraceKind::kWait, "wait", "a \"call\" \\ \x01");
  const uint64_t exchange = trace_begin(TraceKind::kExchange, "exchange", {}, -1);
  trace_message(TraceKind::kSend, 3, 64, exchange, 5);
  const std::string path = save_last_operations(201, "rank 3 is gone");
  ASSERT_EQ(path, folder_ + "/last-operations-rank-201.json");
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  EXPECT_EQ(json["otherData"]["why"], "rank 3 is gone");
  int waits = 0, sends = 0;
  for (const auto& event : json["traceEvents"]) {
    EXPECT_EQ(event["pid"], 201);
    if (event["name"] == "wait") {
      ++waits;
      EXPECT_EQ(event["ph"], "X");
      EXPECT_EQ(event["args"]["of"], "a \"call\" \\ ?");
      EXPECT_EQ(event["args"]["unfinished"], true);
    }
    if (event["name"] == "send" && event["ph"] == "b") {
      ++sends;
      EXPECT_EQ(event["args"]["peer"], 3);
      EXPECT_EQ(event["args"]["bytes"], 64);
      EXPECT_EQ(event["args"]["unfinished"], true);
    }
    EXPECT_TRUE(event["ph"] != "s" && event["ph"] != "f");  // the other end is in another file
  }
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(sends, 1);
}

TEST_F(LastOperations, AreNotSavedWithoutAFolder) {
  EXPECT_EQ(save_last_operations(202, "none"), "");
  set_last_operations_folder(folder_ + "/missing");
  EXPECT_EQ(save_last_operations(202, "none"), "");
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/missing"));
}

}  // namespace
}  // namespace annulus::last_operations_test
