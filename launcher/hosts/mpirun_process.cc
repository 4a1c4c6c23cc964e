// See mpirun_process.h.
#include "launcher/hosts/mpirun_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "launcher/hosts/sockets.h"

namespace annulus {
namespace {

constexpr size_t kKeptText = 20000;

}  // namespace

MpirunProcess::MpirunProcess(const std::vector<std::string>& command, const sigset_t& mask) {
  const auto refuse_call = [](const char* what) {
    throw Error(ErrorKind::kResource, "launcher", std::string(what) + " failed: " + std::strerror(errno));
  };
  std::array<int, 2> pipe_fds{};
  if (pipe2(pipe_fds.data(), O_CLOEXEC) != 0) refuse_call("pipe");
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t launcher = getpid();
  pid_ = fork();
  if (pid_ < 0) refuse_call("fork");
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // if the launcher is killed, mpirun and the job are killed as well
    if (getppid() != launcher) _exit(137);
    setsid();  // so that Ctrl-C reaches only the launcher, which asks the ranks to stop
    setenv("ANNULUS_LAUNCH_MPIRUN", std::to_string(getpid()).c_str(), 1);
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, STDIN_FILENO);
    dup2(pipe_fds[1], STDOUT_FILENO);
    dup2(pipe_fds[1], STDERR_FILENO);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    execv(argv[0], argv.data());
    std::fprintf(stderr, "cannot run %s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  close(pipe_fds[1]);
  output_ = pipe_fds[0];
  fcntl(output_, F_SETFL, O_NONBLOCK);
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
}

MpirunProcess& MpirunProcess::operator=(MpirunProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(output_, other.output_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(status_, other.status_);
  std::swap(text_, other.text_);
  return *this;
}

MpirunProcess::~MpirunProcess() {
  if (pid_ > 0) end(std::chrono::steady_clock::now() + kMpirunEndTime);
  for (const int fd : {output_, pidfd_}) {
    if (fd >= 0) close(fd);
  }
}

void MpirunProcess::watch(std::vector<pollfd>& fds) const {
  for (const int fd : {output_, status_ ? -1 : pidfd_}) {
    if (fd >= 0) fds.push_back({fd, POLLIN, 0});
  }
}

std::string MpirunProcess::read() {
  std::string printed = read_available(output_);
  text_ += printed.substr(0, kKeptText - std::min(kKeptText, text_.size()));
  return printed;
}

bool MpirunProcess::running() {
  if (pid_ <= 0 || status_) return false;
  const bool may_wait = pidfd_ < 0 && output_ < 0;
  return !reap(may_wait ? 0 : WNOHANG);
}

// Returns whether mpirun has ended.
bool MpirunProcess::reap(int options) {
  int status = 0;
  if (waitpid(pid_, &status, options) == pid_) status_ = status;
  return status_.has_value();
}

void MpirunProcess::send(int signal) {
  if (running()) kill(pid_, signal);
}

void MpirunProcess::send_to_group(int signal) {
  if (running()) kill(-pid_, signal);
}

int MpirunProcess::end(std::chrono::steady_clock::time_point deadline) {
  send(SIGTERM);
  while (running() && std::chrono::steady_clock::now() < deadline) {
    std::vector<pollfd> fds;
    watch(fds);
    poll_until(fds, deadline);
    read();
  }
  send_to_group(SIGKILL);
  while (!status_) reap(0);
  read();
  return exit_code();
}

int MpirunProcess::exit_code() const { return exit_signal() > 0 ? 128 + exit_signal() : WEXITSTATUS(*status_); }

int MpirunProcess::exit_signal() const { return WIFSIGNALED(*status_) ? WTERMSIG(*status_) : 0; }

}  // namespace annulus
