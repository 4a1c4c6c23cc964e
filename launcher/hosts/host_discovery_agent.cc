// A host's side of host discovery. See host_discovery.h; host_discovery.cc has the launcher's side.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "comm/bootstrap/launch_info.h"
#include "common/checked_json.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "launcher/hosts/host_discovery.h"
#include "launcher/hosts/sockets.h"

namespace annulus {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kCallTime{20};   // the time to reach the launcher
constexpr std::chrono::seconds kPeerTime{5};    // the time to reach one other host
constexpr std::chrono::seconds kPeersTime{20};  // the time to reach all of them
constexpr size_t kPeersAtOnce = 32;

// Accepts connections from the other hosts on its own thread, so that they can find out whether they reach this one. If
// the job names interfaces, each must be reached; otherwise one address is enough. The token of a socket tells this
// host from another with the same address, such as that of a container bridge.
class Reachable {
 public:
  explicit Reachable(const std::vector<std::string>& interfaces) : stop_(eventfd(0, EFD_CLOEXEC)) {
    std::vector<std::vector<std::string>> groups;
    for (const std::string& name : interfaces) groups.push_back({name});
    if (groups.empty()) groups.emplace_back();
    for (const std::vector<std::string>& group : groups) {
      try {
        sockets_.push_back(std::make_unique<LauncherSocket>(listen_tcp(group)));
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kUsage) throw;  // the report shows that the interface is missing
      }
    }
    thread_ = std::thread([this] { serve(); });
  }
  ~Reachable() {
    const uint64_t one = 1;
    if (write(stop_, &one, sizeof one) == sizeof one) thread_.join();
    close(stop_);
  }
  Reachable(const Reachable&) = delete;
  Reachable& operator=(const Reachable&) = delete;

  json addresses() const {
    json list = json::array();
    for (const auto& socket : sockets_) list.push_back(socket->address());
    return list;
  }

 private:
  void serve() {
    std::vector<pollfd> fds;
    do {
      fds = {{stop_, POLLIN, 0}};
      std::optional<std::chrono::steady_clock::time_point> deadline;
      for (const auto& socket : sockets_) {
        try {
          for (const LauncherSocket::Connection& connection : socket->accept()) close(connection.fd);
        } catch (const Error& error) {
          log_error(error);
          return;  // to the others this host is one that does not answer
        }
        socket->watch(fds);
        deadline = earlier(deadline, socket->deadline());
      }
      poll_until(fds, deadline);
    } while (fds.front().revents == 0);
  }

  const int stop_;
  std::vector<std::unique_ptr<LauncherSocket>> sockets_;
  std::thread thread_;
};

// The time for the next host. If many hosts are silent, the last ones get as little as 200 ms.
std::chrono::milliseconds time_left(std::chrono::steady_clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
  return std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(200), kPeerTime);
}

using Peer = HostQuestion::Peer;

// The sockets of one host that could not be reached: "b at 10.0.0.2:41234 (Connection timed out)".
std::vector<std::string> unreachable(const Peer& peer, int own, std::chrono::steady_clock::time_point end) {
  std::vector<std::string> out;
  for (const std::string& address : peer.addresses) {
    std::string tried;
    const int fd = try_connect(address, "peer", own, time_left(end), tried);
    if (fd < 0) out.push_back(peer.name + " at " + tried);
    if (fd >= 0) close(fd);
  }
  return out;
}

std::vector<std::string> unreachable_of(const std::vector<Peer>& peers, size_t own) {
  std::vector<std::string> out;
  const auto end = std::chrono::steady_clock::now() + kPeersTime;
  for (size_t begin = 0; begin < peers.size(); begin += kPeersAtOnce) {
    // get() waits for the thread and rethrows what it threw.
    std::vector<std::future<std::vector<std::string>>> found;
    for (size_t i = begin; i < std::min(peers.size(), begin + kPeersAtOnce); ++i) {
      if (i == own) continue;
      found.push_back(std::async(std::launch::async, unreachable, std::cref(peers[i]), static_cast<int>(own), end));
    }
    for (auto& of_one : found) {
      for (std::string& text : of_one.get()) out.push_back(std::move(text));
    }
  }
  return out;
}

// Answers the launcher's questions.
class Answers {
 public:
  explicit Answers(int number) : number_(number) {}

  // Returns null if there are no more questions.
  json to(const std::string& text) {
    const HostQuestion question = host_question_of(text);
    switch (question.kind) {
      case HostQuestion::Kind::kDone:
        return nullptr;
      case HostQuestion::Kind::kClock:
        return {{"clock", utc_now()}};
      case HostQuestion::Kind::kPeers:
        return {{"unreachable", unreachable_of(question.peers, static_cast<size_t>(number_))}};
      case HostQuestion::Kind::kReport:
        break;
    }
    const HostReport report = report_of_this_host(question.facts);
    reachable_ = std::make_unique<Reachable>(question.interfaces);
    return {{"report", report_to_json(report)}, {"addresses", reachable_->addresses()}};
  }

 private:
  const int number_;  // the number of this host in the list
  std::unique_ptr<Reachable> reachable_;
};

}  // namespace

HostQuestion host_question_of(std::string_view line) {
  constexpr const char* kSource = "the launcher's request";
  constexpr size_t kMostPeers = 65536;
  const json value = message_of(parse_checked_json(line, "launcher", kSource));
  const CheckedJson request(value, "launcher", kSource);
  if (request.has("done")) return {.kind = HostQuestion::Kind::kDone};
  if (request.has("clock")) return {.kind = HostQuestion::Kind::kClock};
  if (!request.has("peers")) {
    return {.facts = {.files = request.at("files").texts(), .devices = request.at("devices").boolean()},
            .interfaces = request.at("interfaces").texts()};
  }
  HostQuestion question{.kind = HostQuestion::Kind::kPeers};
  for (const CheckedJson& one : request.at("peers").list(kMostPeers)) {
    question.peers.push_back({one.at("name").text(), one.at("addresses").texts()});
  }
  return question;
}

int run_discovery_agent() {
  const LaunchInfo info = launch_info();
  const char* const address = text_from_environment("ANNULUS_LAUNCHER");
  if (address == nullptr || !info.launched) {
    throw Error(ErrorKind::kUsage, "launcher",
                "`host` is started on each host by `launch`, `topology --hosts` and `doctor --hosts`, and does nothing "
                "by itself; use `doctor` to check this host");
  }
  unsetenv("ANNULUS_LAUNCH_MPIRUN");  // set only on the launcher's own host; it must not count as a difference
  const int launcher = connect_to_launcher(address, "host", info.rank, kCallTime);
  Answers answers(info.rank);
  std::string line;
  while (read_line(launcher, line) == LineState::kWhole) {
    json answer;
    try {
      answer = answers.to(std::exchange(line, ""));
      if (answer.is_null()) break;
    } catch (const std::exception&) {
      answer = {{"error", error_in_flight("").wire()}};
    }
    write_all(launcher, message_line(answer), std::chrono::steady_clock::now() + kCallTime);
  }
  close(launcher);
  return 0;
}

}  // namespace annulus
