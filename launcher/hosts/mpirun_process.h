// A running mpirun. Used by host_discovery.cc and launcher/launch/supervisor.cc. Thread safety: one thread at a time.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

inline constexpr std::chrono::seconds kMpirunEndTime{3};  // how long mpirun may take to end on request

class MpirunProcess {
 public:
  MpirunProcess() = default;
  // Starts mpirun with the signal mask `mask`. It is killed when this process ends. Ctrl-C does not reach it, and its
  // standard input is empty. It has no terminal, so that an ssh that would ask for a password or about a host key fails
  // at once, instead of waiting for an answer that nobody can give. Throws Error(kResource).
  MpirunProcess(const std::vector<std::string>& command, const sigset_t& mask);
  MpirunProcess(MpirunProcess&& other) noexcept { *this = std::move(other); }
  MpirunProcess& operator=(MpirunProcess&& other) noexcept;
  ~MpirunProcess();  // ends it

  // Adds the descriptors to poll, which become readable when mpirun prints something or ends.
  void watch(std::vector<pollfd>& fds) const;
  // Reads what it has printed since the last call.
  std::string read();
  // Whether it runs. The end of the process is what counts, not the end of its output, which another process may hold
  // open for long, such as an ssh master connection. Only on a kernel without pidfd may this call wait, for a process
  // that has closed its output. What it printed before it ended can still be read.
  bool running();

  // Sends a signal to mpirun, or to it and its process group. Does nothing if it has ended, because its number may
  // belong to another process by then.
  void send(int signal);
  void send_to_group(int signal);
  // Asks it to end, reads its output, and kills it and its group if it still runs at `deadline`. Returns its exit code,
  // 128 + S if signal S ended it.
  int end(std::chrono::steady_clock::time_point deadline);

  // Once it has ended: its exit code as `end` returns it, and the signal that ended it or 0.
  int exit_code() const;
  int exit_signal() const;
  // The beginning of what it has printed.
  const std::string& text() const { return text_; }

 private:
  bool reap(int options);

  pid_t pid_ = -1;
  int output_ = -1;
  int pidfd_ = -1;
  std::optional<int> status_;  // of waitpid
  std::string text_;
};

}  // namespace annulus
