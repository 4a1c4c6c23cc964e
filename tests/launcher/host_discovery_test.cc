// Tests host discovery with a script as mpirun and threads as hosts: hosts that disconnect or send malformed answers,
// and an mpirun that does not end.
#include "launcher/hosts/host_discovery.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/text.h"
#include "common/version.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/hosts/sockets.h"

namespace annulus::host_discovery_test {
namespace {

using nlohmann::json;
using std::chrono::seconds;

std::chrono::steady_clock::time_point soon() { return std::chrono::steady_clock::now() + seconds(30); }

std::string report_message(const std::string& name) {
  HostReport report;
  report.name = name;
  report.version = kVersion;
  report.host.machine = Machine::from_synthetic("pack:1 [numa] core:2 pu:1", name);
  return json({{"report", report_to_json(report)}, {"addresses", {"00/1/127.0.0.1"}}}).dump();
}

// Returns the answer of a host to a message from the launcher; "" if it sends none.
using Answers = std::function<std::string(const std::string& asked)>;

std::string well(const std::string& asked) {
  const json request = json::parse(asked);
  if (request.contains("clock")) return R"({"clock": 1700000000.5})";
  return request.contains("peers") ? R"({"unreachable": []})" : report_message("a");
}

class HostDiscovery : public ::testing::Test {
 protected:
  HostDiscovery() : folder_(std::filesystem::path(::testing::TempDir()) / "discovery; of \"hosts\"") {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    EXPECT_EQ(mkfifo(fifo_.c_str(), 0600), 0);
  }
  ~HostDiscovery() override {
    unsetenv("MPIRUN");
    unsetenv("ANNULUS_LAUNCHER");
  }

  // The script runs `on_hosts` when it is called to start the discovery, and `alone` when it is called to try one host.
  void make_mpirun(const std::string& on_hosts, const std::string& alone) {
    const std::string path = folder_ / "mpirun";
    std::ofstream(path) << "#!/bin/sh\ncd '" + folder_.string() + "'\n" +
                               "case \"$*\" in\n--version) echo 'mpirun (Open MPI) 4.1.4';;\n" + "*' version') " +
                               alone + ";;\n*) " + on_hosts + ";;\nesac\n";
    chmod(path.c_str(), 0755);
    setenv("MPIRUN", path.c_str(), 1);
  }

  // Starts a thread that plays the first host until the launcher disconnects or sends {"done"}.
  std::thread host(const Answers& answers, const std::function<void()>& at_the_end = nullptr) {
    return std::thread([address = socket_.address(), answers, at_the_end] {
      const int launcher = connect_to_launcher(address, "host", 0, seconds(30));
      for (std::string line; read_line(launcher, line) == LineState::kWhole; line.clear()) {
        if (json::parse(line).contains("done")) break;
        const std::string answer = answers(line);
        if (!answer.empty()) write_all(launcher, answer + "\n", soon());
      }
      if (at_the_end) at_the_end();
      close(launcher);
    });
  }

  std::string refusal(ErrorKind kind) {
    try {
      discover_hosts(options_, socket_);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    }
    return "";
  }

  const std::filesystem::path folder_;
  const std::string fifo_ = folder_ / "fifo";  // a reader blocks until the test writes to it or kills the reader
  LauncherSocket socket_{listen_tcp({})};
  DiscoveryOptions options_{.hosts = {{{"hosta", 1}}, "--hosts"}};
};

TEST_F(HostDiscovery, CollectsReports) {
  make_mpirun("exec cat fifo", "exit 1");
  std::thread one = host(well, [&] { std::ofstream(fifo_) << ""; });  // mpirun ends with its processes
  const std::vector<HostReport> reports = discover_hosts(options_, socket_);
  one.join();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_EQ(reports[0].listed, "hosta");
  EXPECT_EQ(reports[0].name, "a");
}

// For example, ssh's master for later connections keeps the standard error that it was given open.
TEST_F(HostDiscovery, NoticesMpirunExitWhileItsOutputIsHeldOpen) {
  const std::string hold = "cat fifo & echo $! >> held; echo 'ssh: connect to host hosta: No route to host'; exit 1";
  make_mpirun(hold, hold);
  options_.timeout = seconds(10);  // after which a discovery that waits for the end of the output would give up
  const std::string said = refusal(ErrorKind::kUnavailable);
  std::ifstream held(folder_ / "held");
  for (pid_t pid = 0; held >> pid;) kill(pid, SIGKILL);
  EXPECT_NE(said.find("host hosta: ssh: connect to host hosta: No route to host."), std::string::npos) << said;
}

TEST_F(HostDiscovery, StopsOnRequestWhileMpirunRuns) {
  make_mpirun("exec cat fifo", "exit 1");
  options_.stop_fd = eventfd(0, EFD_CLOEXEC);
  options_.stop = [] { return true; };
  std::thread one = host(well, [&] { EXPECT_EQ(eventfd_write(options_.stop_fd, 1), 0); });
  EXPECT_TRUE(discover_hosts(options_, socket_).empty())
      << "all hosts had reported, and the request to stop was ignored";
  one.join();
  close(options_.stop_fd);
}

// The host closes its connection with a request unread, right after its report. The launcher still reads the report,
// but its next write fails. Meanwhile options_.stop holds the launcher.
TEST_F(HostDiscovery, NamesHostThatDisconnectsDuringWrite) {
  make_mpirun("exec cat fifo", "exit 0");
  std::latch asks(1), left(1);
  options_.stop_fd = eventfd(0, EFD_CLOEXEC);
  options_.stop = [&] {
    eventfd_t count = 0;
    EXPECT_EQ(eventfd_read(options_.stop_fd, &count), 0);
    asks.count_down();
    left.wait();
    return false;
  };
  std::thread one([&, address = socket_.address()] {
    const int launcher = connect_to_launcher(address, "host", 0, seconds(30));
    EXPECT_TRUE(wait_for(launcher, POLLIN, soon()));  // the request stays unread
    EXPECT_EQ(eventfd_write(options_.stop_fd, 1), 0);
    asks.wait();
    write_all(launcher, report_message("a") + "\n", soon());
    close(launcher);
    left.count_down();
    std::ofstream(fifo_) << "";  // mpirun ends
  });
  const std::string said = refusal(ErrorKind::kUnavailable);
  one.join();
  close(options_.stop_fd);
  EXPECT_NE(said.find("host hosta of --hosts did not report"), std::string::npos) << said;
}

TEST_F(HostDiscovery, RefusesMalformedAnswersOfHosts) {
  make_mpirun("exec cat fifo", "exit 1");
  const auto said_to = [](const std::string& part, const std::string& answer) -> Answers {
    return [=](const std::string& asked) { return asked.find(part) != std::string::npos ? answer : well(asked); };
  };
  json no_addresses = json::parse(report_message("a"));
  no_addresses["addresses"] = 5;
  const std::vector<std::pair<Answers, std::string>> cases = {
      {said_to("interfaces", R"({"error": 7})"), "error should be a text"},
      {said_to("interfaces", "not JSON"), "JSON"},
      {said_to("interfaces", "[]"), "an object"},
      {said_to("interfaces", no_addresses.dump()), "addresses should be a list"},
      {said_to("clock", R"({"clock": nan})"), "JSON"},
      {said_to("clock", R"({"clock": 1e999})"), ""},
      {said_to("clock", R"({"clock": "late"})"), "a number"},
      {said_to("peers", R"({"unreachable": "all"})"), "unreachable should be a list"},
      {said_to("peers", R"({"unreachable": [1]})"), "unreachable[0] should be a text"},
      {said_to("peers", R"({"error": "no wire"})"), "no wire"},
  };
  for (const auto& [answers, text] : cases) {
    std::thread one = host(answers);
    std::string said;
    try {
      discover_hosts(options_, socket_);
    } catch (const std::exception& error) {
      said = error.what();
    }
    one.join();
    EXPECT_NE(said.find("host hosta"), std::string::npos) << text << ": " << said;
    EXPECT_NE(said.find(text), std::string::npos) << said;
  }
}

TEST(DiscoveryAgent, ReportsMalformedRequests) {
  const std::vector<std::pair<const char*, const char*>> rank = {
      {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}};
  for (const auto& [name, value] : rank) setenv(name, value, 1);
  LauncherSocket socket(listen_tcp({}));
  setenv("ANNULUS_LAUNCHER", socket.address().c_str(), 1);
  std::thread host([] { EXPECT_EQ(run_discovery_agent(), 0); });
  std::vector<LauncherSocket::Connection> connections;
  while (connections.empty()) {
    std::vector<pollfd> fds;
    socket.watch(fds);
    EXPECT_GT(poll_until(fds, soon()), 0);
    connections = socket.accept();
  }
  const int fd = connections.front().fd;
  for (const char* asked : {R"({"peers": [{"name": "a"}, {"name": "b", "addresses": 5}]})", "nonsense", "{}"}) {
    write_all(fd, std::string(asked) + "\n", soon());
    std::string line;
    LineState state = LineState::kWaiting;
    while ((state = read_line(fd, line)) == LineState::kWaiting && wait_for(fd, POLLIN, soon())) {
    }
    EXPECT_EQ(state, LineState::kWhole);
    const auto error = Error::from_wire(json::parse(line).at("error").get<std::string>());
    ASSERT_TRUE(error) << line;
    EXPECT_EQ(error->kind(), ErrorKind::kInput);
    EXPECT_NE(error->message().find("the launcher's request"), std::string::npos) << error->message();
  }
  write_all(fd, message_line({{"done", true}}), soon());
  host.join();
  close(fd);
  for (const auto& [name, value] : rank) unsetenv(name);
  unsetenv("ANNULUS_LAUNCHER");
}

}  // namespace
}  // namespace annulus::host_discovery_test
