// See survey.h: a host's side.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/launch_info.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/sockets.h"
#include "launcher/hosts/survey.h"
#include "launcher/hosts/survey_words.h"

namespace annulus {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kCallTime{20};   // to reach the launcher
constexpr std::chrono::seconds kPeerTime{5};    // to reach another host
constexpr std::chrono::seconds kPeersTime{20};  // to reach all of them
constexpr size_t kPeersAtOnce = 32;

// Lets the other hosts find out whether they reach this one, on a thread of its own: of the interfaces that the job
// names each must be reached, otherwise one address is enough. A channel's token tells this host from another that has
// the same address, such as a bridge of containers.
class Reachable {
 public:
  explicit Reachable(const std::vector<std::string>& interfaces) : stop_(eventfd(0, EFD_CLOEXEC)) {
    std::vector<std::vector<std::string>> groups;
    for (const std::string& name : interfaces) groups.push_back({name});
    if (groups.empty()) groups.emplace_back();
    for (const std::vector<std::string>& group : groups) {
      try {
        channels_.push_back(std::make_unique<BackChannel>(group));
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
    for (const auto& channel : channels_) list.push_back(channel->address());
    return list;
  }

 private:
  void serve() {
    std::vector<pollfd> fds;
    do {
      fds = {{stop_, POLLIN, 0}};
      for (const auto& channel : channels_) {
        try {
          for (const BackChannel::Caller& caller : channel->accept()) close(caller.fd);
        } catch (const Error& error) {
          std::fprintf(stderr, "%s\n", error.what());
          return;  // to the others this host is one that does not answer
        }
        fds.push_back({channel->fd(), POLLIN, 0});
        for (const int fd : channel->pending()) fds.push_back({fd, POLLIN, 0});
      }
      poll(fds.data(), fds.size(), -1);
    } while (fds.front().revents == 0);
  }

  const int stop_;
  std::vector<std::unique_ptr<BackChannel>> channels_;
  std::thread thread_;
};

// Where many hosts are silent, the last ones are given little time.
std::chrono::milliseconds time_left(std::chrono::steady_clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
  return std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(200), kPeerTime);
}

// What could not be reached of one host: "b at 10.0.0.2:41234 (Connection timed out)".
std::vector<std::string> unreachable(const json& peer, int own, std::chrono::steady_clock::time_point end) {
  std::vector<std::string> out;
  for (const std::string& address : peer.value("addresses", std::vector<std::string>())) {
    std::string tried;
    const int fd = reach(address, "peer", own, "-", time_left(end), tried);
    if (fd < 0) out.push_back(peer.value("name", "") + " at " + tried);
    if (fd >= 0) close(fd);
  }
  return out;
}

json unreachable_of(const json& peers, size_t own) {
  std::vector<std::vector<std::string>> found(peers.size());
  const auto end = std::chrono::steady_clock::now() + kPeersTime;
  for (size_t begin = 0; begin < peers.size(); begin += kPeersAtOnce) {
    std::vector<std::thread> threads;
    for (size_t i = begin; i < std::min(peers.size(), begin + kPeersAtOnce); ++i) {
      if (i != own) threads.emplace_back([&, i] { found[i] = unreachable(peers[i], static_cast<int>(own), end); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  json out = json::array();
  for (const auto& of_one : found) {
    for (const std::string& text : of_one) out.push_back(text);
  }
  return out;
}

}  // namespace

int answer_survey() {
  const LaunchInfo info = launch_info();
  const char* const back = text_from_environment("ANNULUS_BACK");
  if (back == nullptr || !info.launched) {
    throw Error(ErrorKind::kUsage, "launcher",
                "`host` is what `launch`, `topology --hosts` and `doctor --hosts` start on each host, and does nothing "
                "by itself; `doctor` says the same of this host");
  }
  unsetenv("ANNULUS_LAUNCH_MPIRUN");  // of the launcher's own host alone, and no difference between hosts
  const int launcher = call_back(back, "survey", info.rank, "report", kCallTime);
  std::unique_ptr<Reachable> reachable;
  std::string line;
  const auto say = [&](const std::string& text) {
    return write_all(launcher, text + "\n", std::chrono::steady_clock::now() + kCallTime);
  };
  while (read_line(launcher, line, kLongestSurveyLine) == LineState::kWhole && line != "done") {
    const std::string asked = std::exchange(line, "");
    if (asked == "clock") {
      say(exact(utc_now()));
      continue;
    }
    const json request = json::parse(asked);
    if (request.contains("peers")) {
      say(survey_line({{"unreachable", unreachable_of(request["peers"], static_cast<size_t>(info.rank))}}));
      continue;
    }
    try {
      const HostReport report = report_of_this_host({.files = request.at("files"), .devices = request.at("devices")});
      reachable = std::make_unique<Reachable>(request.at("interfaces").get<std::vector<std::string>>());
      say(survey_line({{"report", report_to_json(report)}, {"addresses", reachable->addresses()}}));
    } catch (const Error& error) {
      say(survey_line({{"error", error.wire()}}));
    }
  }
  close(launcher);
  return 0;
}

}  // namespace annulus
