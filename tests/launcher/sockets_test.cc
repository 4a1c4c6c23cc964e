// Tests the messages between the processes of a job: texts arrive as they are, whatever their bytes mean.
#include "launcher/hosts/sockets.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
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

// The address of a Unix socket holds 107 bytes, but TMPDIR may be longer.
TEST(LocalSockets, MayHaveLongPaths) {
  for (const size_t length : {1, 80, 107, 108, 250}) {
    const std::string folder = ::testing::TempDir() + std::string(length, 'd');
    std::filesystem::create_directories(folder);
    const Listener listener = listen_unix(folder + "/launcher");
    const int fd = begin_connect(folder + "/launcher", 0);
    ASSERT_GE(fd, 0) << length;
    EXPECT_EQ(connect_error(fd), 0);
    EXPECT_TRUE(wait_for(listener.fd, POLLIN, std::chrono::steady_clock::now() + std::chrono::seconds(30)));
    close(fd);
    close(listener.fd);
    std::filesystem::remove_all(folder);
  }
}

TEST(Messages, LeaveOtherTextsAlone) {
  const json message = {{"text", "\u65e5 and \u00f6"}, {"number", 1.5}, {"none", nullptr}};
  EXPECT_EQ(message_of(message), message);
}

}  // namespace
}  // namespace annulus::sockets_test
