// See watchers.h.
#include "launcher/launch/watchers.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/sockets.h"

namespace annulus {
namespace {

constexpr std::chrono::seconds kTellTime{5};
constexpr size_t kLongestText = 4096;

// Whether a connection ended because of the network or because the other host is down.
bool is_unreachable(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN || error == ENETDOWN;
}

}  // namespace

Watchers::~Watchers() {
  for (const auto& [place, host] : hosts_) {
    if (host.fd >= 0) close(host.fd);
  }
  for (const auto& [rank, fd] : early_) close(fd);
}

void Watchers::add_watcher(size_t rank, int fd) {
  const auto beat = beats_.find(rank);
  if (beat == beats_.end()) {
    const auto [at, is_new] = early_.try_emplace(rank, fd);
    if (!is_new) close(std::exchange(at->second, fd));
    return;
  }
  Host& host = hosts_[beat->second.place];
  if (host.fd >= 0) close(host.fd);
  host.fd = fd;
  host.watched = true;
  for (const size_t known : host.ranks) tell(host, known);
}

void Watchers::add_rank(size_t rank, const std::string& host_name, const CheckedJson& beat) {
  const Beat& added = beats_[rank] = {.place = beat.at("place").text(kLongestText),
                                      .process = static_cast<int>(beat.at("process").integer(1, INT32_MAX)),
                                      .page = static_cast<int>(beat.at("page").integer(-1, INT32_MAX))};
  Host& host = hosts_[added.place];
  host.name = host_name;
  host.ranks.insert(rank);
  if (host.fd >= 0) tell(host, rank);
  if (const auto waits = early_.find(rank); waits != early_.end()) {
    const int fd = waits->second;
    early_.erase(waits);
    add_watcher(rank, fd);
  }
}

void Watchers::tell(Host& host, size_t rank) {
  const Beat& beat = beats_.at(rank);
  write_all(host.fd, message_line({{"rank", rank}, {"process", beat.process}, {"page", beat.page}}),
            std::chrono::steady_clock::now() + kTellTime);
}

void Watchers::rank_ended(size_t rank, int error, bool reported) {
  const auto beat = beats_.find(rank);
  if (beat == beats_.end()) return;
  Host& host = hosts_[beat->second.place];
  if (!reported) {
    host.silent.insert(rank);
    if (first_.empty()) first_ = beat->second.place;
  }
  host.unreachable = host.unreachable || is_unreachable(error);
}

void Watchers::watch(std::vector<pollfd>& fds) const {
  for (const auto& [place, host] : hosts_) {
    if (host.fd >= 0) fds.push_back({host.fd, POLLIN, 0});
  }
}

bool Watchers::open() const {
  return std::any_of(hosts_.begin(), hosts_.end(), [](const auto& host) { return host.second.fd >= 0; });
}

void Watchers::read() {
  for (auto& [place, host] : hosts_) {
    LineState state = LineState::kWaiting;
    while (host.fd >= 0 && (state = read_line(host.fd, host.line)) == LineState::kWhole) {
      take(host, std::exchange(host.line, ""));
    }
    if (host.fd < 0 || state != LineState::kClosed) continue;
    host.unreachable = host.unreachable || is_unreachable(errno);
    host.lost_watch = !host.over;
    close(std::exchange(host.fd, -1));
  }
}

WatchNews watch_news_of(std::string_view line) {
  const nlohmann::json value = message_of(parse_checked_json(line, "launcher", "a message of a watch"));
  const CheckedJson message(value, "launcher", "a message of a watch");
  const auto rank_at = [&](const char* key) { return static_cast<size_t>(message.at(key).integer(0, INT32_MAX)); };
  if (message.has("stuck")) return {.stuck = rank_at("stuck"), .text = message.at("text").text(kLongestText)};
  if (message.has("memory")) return {.memory = rank_at("memory")};
  if (message.has("daemon")) return {.daemon = message.at("daemon").integer(1, INT32_MAX)};
  return {.over = message.at("over").boolean()};
}

void Watchers::take(Host& host, const std::string& line) {
  try {
    const WatchNews news = watch_news_of(line);
    // A watch knows the ranks of its host alone.
    for (const auto& rank : {news.stuck, news.memory}) {
      if (rank && host.ranks.count(*rank) == 0) return;
    }
    if (news.stuck) {
      faults_.push_back(
          {*news.stuck, "rank " + std::to_string(number_of_(*news.stuck)) + " on host " + host.name + " " + news.text});
    } else if (news.memory) {
      for_memory_.insert(*news.memory);
    } else if (news.daemon > 0) {
      host.daemon = news.daemon;
    } else {
      host.over = news.over;
    }
  } catch (const Error&) {  // the watch is of another build: nothing is lost but what it says
  }
}

// What the loss of a host consists in, or nothing if it is not lost. The ranks of a host that is lost end without a
// word, and so do ranks that mpirun ends because another one has ended; the watch of their host tells the one from the
// other, and which rank was the first.
std::optional<std::string> Watchers::loss_of(const std::string& place, const Host& host) const {
  std::vector<int> numbers;
  for (const size_t rank : host.ranks) numbers.push_back(number_of_(rank));
  std::sort(numbers.begin(), numbers.end());
  const std::string ranks = (numbers.size() == 1 ? "rank " : "ranks ") + ranges_text(numbers);
  if (host.unreachable) {
    return "host " + host.name + " (" + ranks +
           ") does not answer any more: it is down, or the network between it and this host is";
  }
  if (host.silent != host.ranks || place != first_) return std::nullopt;
  if (host.daemon > 0) {
    return "mpirun's daemon on host " + host.name + " (process " + std::to_string(host.daemon) + ") has ended, and " +
           ranks + " with it";
  }
  if (!host.lost_watch) return std::nullopt;
  return "host " + host.name + " is lost: " + ranks + " and the watch of the host ended there at once";
}

std::vector<Watchers::Fault> Watchers::take_faults() {
  for (auto& [place, host] : hosts_) {
    if (host.said || host.ranks.empty() || place == own_place_) continue;
    const std::optional<std::string> loss = loss_of(place, host);
    if (!loss) continue;
    host.said = true;
    faults_.push_back({*host.ranks.begin(), *loss});
  }
  return std::exchange(faults_, {});
}

}  // namespace annulus
