// See watcher.h.
#include "launcher/launch/watcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/checked_json.h"
#include "common/environment.h"
#include "common/error.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/hosts/sockets.h"
#include "launcher/launch/host_watch.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::chrono::seconds kCallTime{20};   // the time to reach the launcher
constexpr std::chrono::seconds kSendTime{5};    // and to tell it something
constexpr std::chrono::seconds kRemoveTime{5};  // the time in which mpirun, which dies with the launcher, is gone

// Makes this process one of its own: no signal for the ranks reaches it, it holds none of their files, and it is no
// rank for whoever looks for ranks by the environment of processes. Returns what `connection` is now.
int become_watcher(int connection) {
  setsid();
  for (const int s : {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGPIPE}) signal(s, SIG_IGN);
  prctl(PR_SET_NAME, "annulus-watch");
  constexpr int kKept = STDERR_FILENO + 1;
  if (connection != kKept) dup2(connection, kKept);
  syscall(SYS_close_range, kKept + 1, ~0U, 0);
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null, stream);
  constexpr const char* kRank = "OMPI_COMM_WORLD_RANK";
  if (char* const value = std::getenv(kRank)) std::memset(value - std::strlen(kRank) - 1, 'x', std::strlen(kRank));
  return kKept;
}

class Watcher {
 public:
  Watcher(double after, pid_t daemon, int launcher)
      : ranks_(after, daemon), launcher_(launcher), interval_(after > 0 ? std::clamp(after / 10, 0.1, 1.0) : 1) {
    fcntl(launcher_, F_SETFL, fcntl(launcher_, F_GETFL) | O_NONBLOCK);
  }

  // Runs until all ranks have ended; returns false if the launcher is gone before.
  bool run() {
    Clock::time_point last = Clock::now();
    while (!ranks_.over()) {
      std::vector<pollfd> fds = {{launcher_, POLLIN, 0}};
      ranks_.watch(fds);
      poll_until(fds, Clock::now() + std::chrono::duration_cast<Clock::duration>(interval_));
      if (!read()) return false;
      const Clock::time_point now = Clock::now();
      // If this process did not get to run for long, the ranks may not have either.
      const double elapsed = std::min(Seconds(now - std::exchange(last, now)), 2 * interval_).count();
      for (const nlohmann::json& news : ranks_.look(elapsed)) tell(news);
    }
    tell({{"over", true}});
    return true;
  }

  void end_ranks() const { ranks_.end_ranks(); }

 private:
  // Takes the ranks that the launcher names. Returns false if it is gone.
  bool read() {
    LineState state = LineState::kWaiting;
    while ((state = read_line(launcher_, line_)) == LineState::kWhole) {
      const nlohmann::json value = message_of(parse_checked_json(std::exchange(line_, ""), "watch", "a message"));
      const CheckedJson message(value, "watch", "a message");
      ranks_.add(static_cast<int>(message.at("rank").integer(0, INT32_MAX)),
                 static_cast<pid_t>(message.at("process").integer(1, INT32_MAX)),
                 static_cast<int>(message.at("page").integer(-1, INT32_MAX)));
    }
    return state != LineState::kClosed;
  }

  void tell(const nlohmann::json& news) { write_all(launcher_, message_line(news), Clock::now() + kSendTime); }

  HostWatch ranks_;
  const int launcher_;
  const Seconds interval_;
  std::string line_;
};

// mpirun may still write to the folder while it is being ended.
void remove_folder(const std::string& folder) {
  const Clock::time_point deadline = Clock::now() + kRemoveTime;
  std::error_code error;
  do {
    std::filesystem::remove_all(folder, error);
    if (!std::filesystem::exists(folder, error)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (Clock::now() < deadline);
}

[[noreturn]] void watch(int connection, const std::string& folder, pid_t daemon) {
  connection = become_watcher(connection);
  try {
    Watcher watcher(number_from_environment("ANNULUS_STUCK_AFTER", 0, 0, 1e9), daemon, connection);
    if (!watcher.run()) {
      watcher.end_ranks();
      if (!folder.empty()) remove_folder(folder);
    }
  } catch (const std::exception&) {  // the host stays unwatched
  }
  _exit(0);
}

}  // namespace

void start_watcher(const std::string& address, int rank, const std::string& folder) {
  const pid_t daemon = getppid();
  // Connected here, so that the launcher knows of the watch before this rank can end.
  const int connection = connect_to_launcher(address, "watch", rank, kCallTime);
  if (fork() == 0) watch(connection, folder, daemon);
  close(connection);
}

}  // namespace annulus
