// Tests the messages between the processes of a job: texts arrive as they are, whatever their bytes mean.
#include "launcher/hosts/sockets.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace annulus::sockets_test {
namespace {

using nlohmann::json;

json delivered(const json& message) {
  const std::string line = message_line(message);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  return message_of(json::parse(line));  // refuses bytes that are not UTF-8
}

TEST(Messages, KeepEveryByteOfTexts) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  const std::string path = "/runs/\xff\xfe of K\xf6ln/step-5", utf8 = "/runs/K\u00f6ln \u65e5\u672c \U0001f600";
  for (const std::string& text : {path, utf8, all, std::string("plain"), std::string()}) {
    const json message = {{"checkpoint", {{"step", 5}, {"folder", text}, {"command", {"train", text}}}}, {text, true}};
    EXPECT_EQ(delivered(message), message) << text;
  }
}

TEST(Messages, LeaveOtherTextsAlone) {
  const json message = {{"text", "\u65e5 and \u00f6"}, {"number", 1.5}, {"none", nullptr}};
  EXPECT_EQ(message_of(message), message);
}

}  // namespace
}  // namespace annulus::sockets_test
