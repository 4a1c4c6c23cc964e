// Tests the socket of a launcher, over TCP and as a Unix socket: which connections it accepts, and that all bytes
// arrive.
#include "launcher/hosts/launcher_socket.h"

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

namespace annulus::launcher_socket_test {
namespace {

using std::chrono::seconds;

// Polls as the launcher does, until `count` connections have been accepted.
std::vector<LauncherSocket::Connection> connections(LauncherSocket& socket, size_t count) {
  std::vector<LauncherSocket::Connection> all;
  while (all.size() < count) {
    std::vector<pollfd> fds;
    socket.watch(fds);
    EXPECT_GT(poll(fds.data(), fds.size(), 30000), 0);
    for (LauncherSocket::Connection& connection : socket.accept()) all.push_back(std::move(connection));
  }
  return all;
}

size_t pending(const LauncherSocket& socket) {
  std::vector<pollfd> fds;
  socket.watch(fds);
  return fds.size() - 1;
}

std::string hello(const std::string& token, const std::string& rest = R"(, "purpose": "out", "number": 3)") {
  return R"({"token": ")" + token + "\"" + rest + "}\n";
}

std::string read_to_end(int fd) {
  std::string text;
  std::string line;
  LineState state = LineState::kWaiting;
  while (state != LineState::kClosed) {
    state = read_line(fd, line);
    if (state == LineState::kWaiting) wait_for(fd, POLLIN, std::chrono::steady_clock::now() + seconds(30));
    if (state == LineState::kWhole) text += std::exchange(line, "") + "\n";
  }
  close(fd);
  return text + line;
}

int connect_plainly(const LauncherSocket& socket) {
  const std::vector<std::string> parts = split(socket.address(), '/');
  const int fd = begin_connect(split(parts.at(2), ',').front(), std::stoi(parts.at(1)));
  EXPECT_TRUE(wait_for(fd, POLLOUT, std::chrono::steady_clock::now() + seconds(30)));
  return fd;
}

bool is_closed(int fd) {
  char byte = 0;
  EXPECT_TRUE(wait_for(fd, POLLIN, std::chrono::steady_clock::now() + seconds(30)));
  return recv(fd, &byte, 1, 0) <= 0;
}

void deliver(const Listener& listener) {
  LauncherSocket socket(listener);
  std::thread rank([address = socket.address()] {
    for (const char* purpose : {"out", "err", "control"}) {
      const int fd = connect_to_launcher(address, purpose, 7, seconds(30));
      EXPECT_EQ(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
      EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
      const std::string text = std::string(purpose) + " of a rank\nwithout an end";
      EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
      close(fd);
    }
  });
  const std::vector<LauncherSocket::Connection> all = connections(socket, 3);
  rank.join();
  for (const LauncherSocket::Connection& connection : all) {
    EXPECT_EQ(connection.number, 7);
    EXPECT_NE(fcntl(connection.fd, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(read_to_end(connection.fd), connection.purpose + " of a rank\nwithout an end");
  }
}

TEST(LauncherSocket, DeliversStreamsUnderTheirNames) {
  deliver(listen_tcp({}));
  const std::string path = ::testing::TempDir() + "/a launcher, of ranks";
  unlink(path.c_str());
  deliver(listen_unix(path));
}

// A rank on another host or in a container must not try to reach a path.
TEST(LauncherSocket, TellsLocalAddressesFromOthers) {
  const std::string path = ::testing::TempDir() + "/a local launcher";
  unlink(path.c_str());
  EXPECT_TRUE(is_local_address(LauncherSocket(listen_unix(path)).address()));
  EXPECT_FALSE(is_local_address(LauncherSocket(listen_tcp({})).address()));
  EXPECT_FALSE(is_local_address("nonsense"));
}

TEST(LauncherSocket, DropsInvalidConnections) {
  LauncherSocket socket(listen_tcp({}));
  const std::string token = split(socket.address(), '/').front();
  std::string wrong = token;
  wrong.front() = wrong.front() == 'a' ? 'b' : 'a';
  std::vector<int> strangers;
  for (const std::string& text :
       {hello(wrong), std::string("GET / HTTP/1.1\r\n\r\n"), hello(token, R"(, "purpose": "out", "number": -1)"),
        hello(token, ""), std::string(100000, 'x')}) {
    strangers.push_back(connect_plainly(socket));
    EXPECT_TRUE(write_all(strangers.back(), text, std::chrono::steady_clock::now() + seconds(30)));
  }
  std::thread friendly([address = socket.address()] { close(connect_to_launcher(address, "host", 0, seconds(30))); });
  const LauncherSocket::Connection only = connections(socket, 1).front();
  EXPECT_EQ(only.purpose, "host");
  close(only.fd);
  friendly.join();
  while (pending(socket) > 0) EXPECT_TRUE(socket.accept().empty());
  for (const int fd : strangers) {
    EXPECT_TRUE(is_closed(fd));
    close(fd);
  }
}

TEST(LauncherSocket, TakesConnectionsAtTheNamedInterfacesOnly) {
  LauncherSocket socket(listen_tcp({"lo"}));
  const std::vector<std::string> parts = split(socket.address(), '/');
  // An address of this host that no interface is listed with.
  const int elsewhere = begin_connect("127.0.0.2", std::stoi(parts[1]));
  std::thread friendly([address = socket.address()] { close(connect_to_launcher(address, "host", 0, seconds(30))); });
  const LauncherSocket::Connection only = connections(socket, 1).front();
  EXPECT_EQ(only.purpose, "host");
  close(only.fd);
  friendly.join();
  EXPECT_TRUE(socket.accept().empty());
  EXPECT_EQ(pending(socket), 0u);
  EXPECT_TRUE(is_closed(elsewhere)) << "without a word, although it has not sent anything yet";
  close(elsewhere);
}

TEST(LauncherSocket, PartialFirstMessageDoesNotBlockOthers) {
  LauncherSocket socket(listen_tcp({}));
  const std::string text = hello(split(socket.address(), '/').front()) + "all of it";
  const int slow = connect_plainly(socket);
  EXPECT_TRUE(write_all(slow, text.substr(0, 20), std::chrono::steady_clock::now() + seconds(30)));
  std::thread quick([address = socket.address()] { close(connect_to_launcher(address, "out", 1, seconds(30))); });
  std::vector<LauncherSocket::Connection> all = connections(socket, 1);
  quick.join();
  EXPECT_EQ(all.front().number, 1);
  close(all.front().fd);
  EXPECT_TRUE(write_all(slow, text.substr(20), std::chrono::steady_clock::now() + seconds(30)));
  all = connections(socket, 1);
  EXPECT_EQ(all.front().number, 3);
  std::string answer;
  EXPECT_TRUE(wait_for(slow, POLLIN, std::chrono::steady_clock::now() + seconds(30)));
  EXPECT_EQ(read_line(slow, answer), LineState::kWhole);
  EXPECT_EQ(answer, R"({"accepted":true})");
  close(slow);
  EXPECT_EQ(read_to_end(all.front().fd), "all of it");
}

TEST(LauncherSocket, NamesAddressesThatFailed) {
  const std::string address = LauncherSocket(listen_tcp({})).address();
  try {
    connect_to_launcher(address, "out", 0, seconds(30));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    const std::vector<std::string> parts = split(address, '/');
    const std::string first = endpoint_text(split(parts[2], ',').front(), std::stoi(parts[1]));
    EXPECT_NE(std::string(error.what()).find("tried " + first + " (Connection refused)"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("--interfaces"), std::string::npos);
  }
  EXPECT_THROW(connect_to_launcher("nonsense", "out", 0, seconds(1)), Error);
}

// Without an error, the socket would stay ready for ever, and the caller would never get an answer.
TEST(LauncherSocket, ReportsExhaustedFileDescriptors) {
  LauncherSocket socket(listen_tcp({}));
  const int caller = connect_plainly(socket);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int lowest = dup(caller);
  close(lowest);
  const rlimit none_left{static_cast<rlim_t>(lowest), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none_left);
  std::string said;
  try {
    socket.accept();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kResource);
    said = error.what();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  close(caller);
  EXPECT_NE(said.find("Too many open files"), std::string::npos) << said;
  EXPECT_NE(said.find("ulimit -n"), std::string::npos) << said;
}

// A stranger that holds the last file descriptor must not end the job.
TEST(LauncherSocket, ClosesStrangersForTheirFileDescriptors) {
  LauncherSocket socket(listen_tcp({}));
  const int stranger = connect_plainly(socket), rank = connect_plainly(socket);
  EXPECT_TRUE(
      write_all(rank, hello(split(socket.address(), '/').front()), std::chrono::steady_clock::now() + seconds(30)));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int lowest = dup(rank);
  close(lowest);
  const rlimit one_left{static_cast<rlim_t>(lowest) + 1, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &one_left);
  std::vector<LauncherSocket::Connection> all;
  EXPECT_NO_THROW(all = socket.accept());
  setrlimit(RLIMIT_NOFILE, &before);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all.front().number, 3);
  EXPECT_TRUE(is_closed(stranger));
  for (const int fd : {stranger, rank, all.front().fd}) close(fd);
}

TEST(LauncherSocket, HoldsNoMoreStrangersThanCallersAccountFor) {
  Listener listener = listen_tcp({});
  listener.addresses.resize(1);
  LauncherSocket socket(listener, 2);
  EXPECT_FALSE(socket.deadline());
  std::vector<int> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(connect_plainly(socket));
  std::thread rank([address = socket.address()] { close(connect_to_launcher(address, "out", 1, seconds(30))); });
  const std::vector<LauncherSocket::Connection> all = connections(socket, 1);
  rank.join();
  EXPECT_EQ(all.front().number, 1);
  EXPECT_LE(pending(socket), 66u);
  EXPECT_TRUE(is_closed(strangers.front()));
  // Otherwise nothing would end the wait for those that are left.
  ASSERT_TRUE(socket.deadline());
  EXPECT_LE(*socket.deadline(), std::chrono::steady_clock::now() + seconds(10));
  close(all.front().fd);
  for (const int fd : strangers) close(fd);
}

// A listener that accepts connections and sends nothing takes the place of the launcher.
TEST(LauncherSocket, ReportsLauncherThatDoesNotAnswer) {
  const Listener silent = listen_tcp({});
  try {
    connect_to_launcher("00/" + std::to_string(silent.port) + "/127.0.0.1", "out", 0, std::chrono::milliseconds(50));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("(it does not answer)"), std::string::npos) << error.what();
  }
  close(silent.fd);
}

TEST(LauncherSocket, RefusesInterfacesOfOtherHosts) {
  EXPECT_EQ(own_addresses({"lo"}).front(), "127.0.0.1");
  try {
    listen_tcp({"lo", "eth99"});
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
}  // namespace annulus::launcher_socket_test
