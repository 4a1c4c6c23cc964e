// Implements Presence with abstract Unix sockets. See presence.h.
#include "comm/bootstrap/presence.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>

#include "comm/checks.h"
#include "common/text.h"

namespace annulus::comm_internal {
namespace {

struct Address {
  sockaddr_un address{};
  socklen_t length = 0;
};

// The name begins with a zero byte, so there is no file, and the name disappears with the process that holds it.
Address abstract_address(const std::string& name) {
  Address out;
  out.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(out.address.sun_path) - 1);
  std::memcpy(out.address.sun_path + 1, name.data(), length);
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return out;
}

int bind_abstract(const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const Address address = abstract_address(name);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address.address), address.length) == 0 &&
      listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  close(fd);
  return -1;
}

bool is_stopped(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return false;
  const char state = text[name_end + 2];
  return state == 'T' || state == 't';
}

struct Found {
  bool here = false;
  bool stopped = false;
};

Found find(const std::string& name) {
  Found found;
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return found;
  const Address address = abstract_address(name);
  const int code = connect(fd, reinterpret_cast<const sockaddr*>(&address.address), address.length);
  found.here = code == 0 || errno == EAGAIN;  // EAGAIN: the socket is there, but its queue is full
  ucred peer{};
  socklen_t length = sizeof peer;
  found.stopped = code == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && is_stopped(peer.pid);
  close(fd);
  return found;
}

}  // namespace

Presence::Presence(const LaunchInfo& info) : info_(info), socket_(bind_abstract(name_of(std::to_string(info.rank)))) {}

Presence::~Presence() {
  if (socket_ >= 0) close(socket_);
  if (report_ >= 0) close(report_);
}

std::string Presence::name_of(const std::string& what) const {
  char key[32];
  std::snprintf(key, sizeof key, "%016zx", std::hash<std::string>{}(info_.job));
  return "annulus-" + std::to_string(getuid()) + "-" + key + "-" + what;
}

Presence::Seen Presence::seen() const {
  Seen seen;
  for (int rank = 0; rank < info_.size; ++rank) {
    const Found found = find(name_of(std::to_string(rank)));
    if (found.here) seen.here.push_back(rank);
    if (found.stopped) seen.stopped.push_back(rank);
  }
  return seen;
}

bool Presence::all_live() const {
  const Seen ranks = seen();
  return static_cast<int>(ranks.here.size()) == info_.size && ranks.stopped.empty();
}

bool Presence::report_claimed() const { return find(name_of("report")).here; }

bool Presence::claim_report() {
  if (socket_ < 0) return info_.rank == 0;  // names cannot be bound here
  if (report_ < 0) report_ = bind_abstract(name_of("report"));
  return report_ >= 0;
}

std::string describe_missing(const LaunchInfo& info, const Presence& presence, const std::string& host,
                             bool* local_fault) {
  const Presence::Seen seen = presence.seen();
  const bool one_host = info.local_size == info.size;
  const int absent = info.local_size > 0 ? info.local_size - static_cast<int>(seen.here.size()) : 0;
  *local_fault = absent > 0 || !seen.stopped.empty();
  std::string text;
  const auto add = [&](const std::string& sentence) { text += (text.empty() ? "" : "; ") + sentence; };
  if (absent > 0 && one_host) {
    std::vector<int> missing;
    for (int rank = 0; rank < info.size; ++rank) {
      if (!std::binary_search(seen.here.begin(), seen.here.end(), rank)) missing.push_back(rank);
    }
    add(describe_ranks(missing) + (missing.size() == 1 ? " has" : " have") + " not come (host " + host + ")");
  } else if (absent > 0) {
    add(std::to_string(absent) + " of the " + counted(info.local_size, "rank") + " of host " + host +
        " have not come (here: " + (seen.here.empty() ? "none" : describe_ranks(seen.here)) + ")");
  }
  if (!seen.stopped.empty()) {
    add(describe_stopped(seen.stopped, host));
  }
  if (text.empty() && one_host) add("all ranks have come, but one does not respond");
  if (text.empty()) add("nothing is wrong on host " + host + ", so ranks of other hosts have not come");
  return text;
}

std::string describe_stalled(const LaunchInfo& info, const Presence& presence, const std::string& host,
                             const std::function<int(int)>& in_job) {
  const auto numbered = [&](std::vector<int> ranks) {
    for (int& rank : ranks) rank = in_job(rank);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  const auto holds = [](const std::vector<int>& ranks, int rank) {
    return std::binary_search(ranks.begin(), ranks.end(), rank);
  };
  const Presence::Seen seen = presence.seen();
  std::vector<int> gone;
  if (info.local_size == info.size && holds(seen.here, info.rank)) {
    for (int rank = 0; rank < info.size; ++rank) {
      if (!holds(seen.here, rank)) gone.push_back(rank);
    }
  }
  std::string text = seen.stopped.empty() ? "" : describe_stopped(numbered(seen.stopped), host);
  if (gone.empty()) return text;
  if (!text.empty()) text += "; ";
  return text + describe_ranks(numbered(gone)) + (gone.size() == 1 ? " is" : " are") + " gone (host " + host + ")";
}

}  // namespace annulus::comm_internal
