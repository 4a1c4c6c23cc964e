// Tests the back channel over this machine's loopback: which callers it accepts, and that all bytes arrive.
#include "launcher/hosts/back_channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/sockets.h"

namespace annulus::back_channel_test {
namespace {

using std::chrono::seconds;

// Polls as the launcher does, until `count` callers have connected.
std::vector<BackChannel::Caller> callers(BackChannel& channel, size_t count) {
  std::vector<BackChannel::Caller> all;
  while (all.size() < count) {
    std::vector<pollfd> fds = {{channel.fd(), POLLIN, 0}};
    for (const int fd : channel.pending()) fds.push_back({fd, POLLIN, 0});
    EXPECT_GT(poll(fds.data(), fds.size(), 30000), 0);
    for (BackChannel::Caller& caller : channel.accept()) all.push_back(std::move(caller));
  }
  return all;
}

std::string read_to_end(int fd) {
  std::string text;
  std::string line;
  LineState state = LineState::kWaiting;
  while (state != LineState::kClosed) {
    state = read_line(fd, line, 1 << 20);
    if (state == LineState::kWaiting) wait_for(fd, POLLIN, std::chrono::steady_clock::now() + seconds(30));
    if (state == LineState::kWhole) text += std::exchange(line, "") + "\n";
  }
  close(fd);
  return text + line;
}

int connect_plainly(const BackChannel& channel) {
  const std::vector<std::string> parts = split(channel.address(), '/');
  const int fd = begin_connect(split(parts.at(2), ',').front(), std::stoi(parts.at(1)));
  EXPECT_TRUE(wait_for(fd, POLLOUT, std::chrono::steady_clock::now() + seconds(30)));
  return fd;
}

bool is_closed(int fd) {
  char byte = 0;
  EXPECT_TRUE(wait_for(fd, POLLIN, std::chrono::steady_clock::now() + seconds(30)));
  return recv(fd, &byte, 1, 0) <= 0;
}

TEST(BackChannel, DeliversStreamsUnderTheirNames) {
  BackChannel channel({});
  std::thread rank([back = channel.address()] {
    for (const char* stream : {"out", "err", "control"}) {
      const int fd = call_back(back, "rank", 7, stream, seconds(30));
      EXPECT_EQ(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
      EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
      const std::string text = std::string(stream) + " of a rank\nwithout an end";
      EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
      close(fd);
    }
  });
  const std::vector<BackChannel::Caller> all = callers(channel, 3);
  rank.join();
  for (const BackChannel::Caller& caller : all) {
    EXPECT_EQ(caller.kind, "rank");
    EXPECT_EQ(caller.number, 7);
    EXPECT_NE(fcntl(caller.fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(read_to_end(caller.fd), caller.stream + " of a rank\nwithout an end");
  }
}

TEST(BackChannel, DropsInvalidCallers) {
  BackChannel channel({});
  std::string wrong = channel.address();
  wrong.front() = wrong.front() == 'a' ? 'b' : 'a';
  std::vector<int> strangers;
  for (const std::string& hello : {split(wrong, '/').front() + " rank 0 out\n", std::string("GET / HTTP/1.1\r\n\r\n"),
                                   split(channel.address(), '/').front() + " rank -1 out\n",
                                   split(channel.address(), '/').front() + "\n", std::string(100000, 'x')}) {
    strangers.push_back(connect_plainly(channel));
    EXPECT_TRUE(write_all(strangers.back(), hello, std::chrono::steady_clock::now() + seconds(30)));
  }
  std::thread friendly([back = channel.address()] { close(call_back(back, "survey", 0, "report", seconds(30))); });
  for (std::string kind; kind != "survey";) {
    for (const BackChannel::Caller& caller : callers(channel, 1)) {
      kind = caller.kind;
      EXPECT_EQ(kind, "survey");
      close(caller.fd);
    }
  }
  friendly.join();
  while (!channel.pending().empty()) EXPECT_TRUE(channel.accept().empty());
  for (const int fd : strangers) {
    EXPECT_TRUE(is_closed(fd));
    close(fd);
  }
}

TEST(BackChannel, PartialFirstLineDoesNotBlockOthers) {
  BackChannel channel({});
  const std::string hello = split(channel.address(), '/').front() + " rank 3 out\nall of it";
  const int slow = connect_plainly(channel);
  EXPECT_TRUE(write_all(slow, hello.substr(0, 20), std::chrono::steady_clock::now() + seconds(30)));
  std::thread quick([back = channel.address()] { close(call_back(back, "rank", 1, "out", seconds(30))); });
  std::vector<BackChannel::Caller> all = callers(channel, 1);
  quick.join();
  EXPECT_EQ(all.front().number, 1);
  close(all.front().fd);
  EXPECT_TRUE(write_all(slow, hello.substr(20), std::chrono::steady_clock::now() + seconds(30)));
  all = callers(channel, 1);
  EXPECT_EQ(all.front().number, 3);
  std::string answer;
  EXPECT_TRUE(wait_for(slow, POLLIN, std::chrono::steady_clock::now() + seconds(30)));
  EXPECT_EQ(read_line(slow, answer, 100), LineState::kWhole);
  EXPECT_EQ(answer, "ok");
  close(slow);
  EXPECT_EQ(read_to_end(all.front().fd), "all of it");
}

TEST(BackChannel, NamesAddressesThatFailed) {
  std::string back;
  {
    BackChannel channel({});
    back = channel.address();
  }
  try {
    call_back(back, "rank", 0, "out", seconds(30));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    const std::vector<std::string> parts = split(back, '/');
    const std::string first = endpoint_text(split(parts[2], ',').front(), std::stoi(parts[1]));
    EXPECT_NE(std::string(error.what()).find("tried " + first + " (Connection refused)"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("--interfaces"), std::string::npos);
  }
  EXPECT_THROW(call_back("nonsense", "rank", 0, "out", seconds(1)), Error);
}

// Without an error, the socket would stay ready for ever, and the caller would never get an answer.
TEST(BackChannel, ReportsExhaustedFileDescriptors) {
  BackChannel channel({});
  const int caller = connect_plainly(channel);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int lowest = dup(caller);
  close(lowest);
  const rlimit none_left{static_cast<rlim_t>(lowest), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none_left);
  std::string said;
  try {
    channel.accept();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kResource);
    said = error.what();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  close(caller);
  EXPECT_NE(said.find("Too many open files"), std::string::npos) << said;
  EXPECT_NE(said.find("ulimit -n"), std::string::npos) << said;
}

// A listener that accepts connections and sends nothing takes the place of the launcher.
TEST(BackChannel, ReportsLauncherThatDoesNotAnswer) {
  const Listener silent = listen_anywhere();
  try {
    call_back("00/" + std::to_string(silent.port) + "/127.0.0.1", "rank", 0, "out", std::chrono::milliseconds(50));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("(it does not answer)"), std::string::npos) << error.what();
  }
  close(silent.fd);
}

TEST(BackChannel, RefusesInterfacesOfOtherHosts) {
  EXPECT_EQ(own_addresses({"lo"}).front(), "127.0.0.1");
  try {
    BackChannel channel({"lo", "eth99"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    const std::string text = error.what();
    EXPECT_NE(text.find("interface eth99 of this job is not on this host"), std::string::npos) << text;
    EXPECT_NE(text.find("with an address here: "), std::string::npos) << text;
    EXPECT_NE(text.find("lo"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace annulus::back_channel_test
