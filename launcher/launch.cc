// See launch.h.
#include "launcher/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>

#include "comm/launch_info.h"
#include "common/error.h"
#include "launcher/host_plan.h"
#include "launcher/mpirun.h"
#include "launcher/session_dir.h"
#include "launcher/terminal.h"

extern char** environ;

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// How long mpirun may take to end the ranks after SIGTERM, and a job whose first rank failed to end by itself.
constexpr std::chrono::seconds kTermGrace{5};
constexpr std::chrono::seconds kFailureGrace{15};

std::string now_text(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 64> text{};
  return std::string(text.data(), std::strftime(text.data(), text.size(), format, &local));
}

// The folder for the log files. Without --log-dir in a folder that cannot be written, logs go where temporary files go.
std::string make_log_dir(const std::string& wanted) {
  std::error_code error;
  if (!wanted.empty()) {
    fs::create_directories(wanted, error);
    if (error || access(wanted.c_str(), W_OK | X_OK) != 0) {
      throw Error(ErrorKind::kResource, "launcher",
                  "--log-dir " + wanted + " cannot be written: " + (error ? error.message() : std::strerror(errno)));
    }
    return wanted;
  }
  const std::string name = now_text("%Y%m%d-%H%M%S-") + std::to_string(getpid());
  const char* tmp = std::getenv("TMPDIR");
  const std::string fallback = std::string(tmp && *tmp ? tmp : "/tmp") + "/annulus-logs-" + std::to_string(getuid());
  for (const std::string& base : {std::string("runs/logs"), fallback}) {
    const std::string dir = base + "/" + name;
    if (fs::create_directories(dir, error) && !error) return dir;
  }
  throw Error(ErrorKind::kResource, "launcher",
              "no folder for log files: neither runs/logs nor " + fallback + " can be written (" + error.message() +
                  "); name one with --log-dir");
}

void set_env(const char* name, const std::string& value) { setenv(name, value.c_str(), 1); }

// "0", "0-3", "0, 2-3"
std::string rank_list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[i]);
    if (j > i) text += "-" + std::to_string(ranks[j]);
    i = j + 1;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string signal_text(int signal) { return "signal " + std::to_string(signal) + " (" + strsignal(signal) + ")"; }

// One stream of one rank, or of mpirun itself.
struct Source {
  int fd = -1;
  LineSplitter terminal;  // lines for the terminal; unused where bytes pass through
  LineSplitter log;
};

struct RankState {
  Source out, err;
  std::ofstream log;
  Clock::time_point last_live{};  // when a replaced ('\r') line was last written to the log
  std::deque<std::string> tail;   // last lines of standard error
  int64_t shown = 0;              // when the terminal last showed something of it, in Supervisor::shown_
  int pidfd = -1;
  bool started = false;
  bool reported = false;  // said how it ended
};

struct Failure {
  int rank = 0;
  int code = 0;
  std::string message;
  bool said = false;    // the message has been printed already
  bool abrupt = false;  // ended without a word: a signal, or _exit
};

// From now on signals wait to be read, so that none comes between making things and being able to take them away.
struct Signals {
  Signals() {
    // Ctrl-C works also where a shell started this program in the background with SIGINT ignored.
    signal(SIGINT, SIG_DFL);
    signal(SIGPIPE, SIG_IGN);
    sigset_t blocked;
    sigemptyset(&blocked);
    for (const int s : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) sigaddset(&blocked, s);
    struct sigaction hangup {};
    sigaction(SIGHUP, nullptr, &hangup);
    if (hangup.sa_handler != SIG_IGN) sigaddset(&blocked, SIGHUP);  // nohup stays nohup
    sigprocmask(SIG_BLOCK, &blocked, &before);
    fd = signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) {
      throw Error(ErrorKind::kResource, "launcher", std::string("signalfd failed: ") + std::strerror(errno));
    }
  }
  ~Signals() { close(fd); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd = -1;
  sigset_t before;
};

class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const Signals& signals, const std::string& session_dir,
             const std::string& log_dir)
      : options_(options),
        signals_(signals),
        session_dir_(session_dir),
        log_dir_(log_dir),
        terminal_(STDOUT_FILENO, STDERR_FILENO) {
    open_streams();
  }

  ~Supervisor() {
    for (RankState& r : ranks_) {
      for (int fd : {r.out.fd, r.err.fd, r.pidfd}) {
        if (fd >= 0) close(fd);
      }
    }
    for (int fd : {control_, mpirun_.fd}) {
      if (fd >= 0) close(fd);
    }
  }

  void start(const std::vector<std::string>& command) {
    std::array<int, 2> pipe_fds{};
    if (pipe2(pipe_fds.data(), O_CLOEXEC) != 0) fail("pipe");
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t launcher = getpid();
    mpirun_pid_ = fork();
    if (mpirun_pid_ < 0) fail("fork");
    if (mpirun_pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // a killed launcher takes the job with it
      if (getppid() != launcher) _exit(137);
      setpgid(0, 0);  // Ctrl-C reaches the launcher alone, which asks the ranks to stop
      set_env("ANNULUS_LAUNCH_MPIRUN", std::to_string(getpid()));
      const int null = open("/dev/null", O_RDONLY);
      dup2(null, STDIN_FILENO);
      dup2(pipe_fds[1], STDOUT_FILENO);
      dup2(pipe_fds[1], STDERR_FILENO);
      signal(SIGPIPE, SIG_DFL);
      sigprocmask(SIG_SETMASK, &signals_.before, nullptr);
      execv(argv[0], argv.data());
      std::fprintf(stderr, "cannot run %s: %s\n", argv[0], std::strerror(errno));
      _exit(127);
    }
    setpgid(mpirun_pid_, mpirun_pid_);
    close(pipe_fds[1]);
    mpirun_.fd = pipe_fds[0];
    fcntl(mpirun_.fd, F_SETFL, O_NONBLOCK);
  }

  // Until mpirun has ended and nothing is left to read. Returns the exit code.
  int run() {
    while (!mpirun_code_) {
      wait_for_events();
      read_all();
      act_on_deadlines();
    }
    read_all();
    for (RankState& r : ranks_) {
      if (r.pidfd >= 0) syscall(SYS_pidfd_send_signal, r.pidfd, SIGKILL, nullptr, 0);  // one that outlived mpirun
    }
    finish_lines();
    return conclude();
  }

  std::ofstream& log() { return log_; }

 private:
  [[noreturn]] void fail(const char* what) {
    throw Error(ErrorKind::kResource, "launcher", std::string(what) + " failed: " + std::strerror(errno));
  }

  int open_fifo(const std::string& name) {
    const std::string path = session_dir_ + "/" + name;
    if (mkfifo(path.c_str(), 0600) != 0) fail("mkfifo");
    // For reading and writing: a rank can open its end at once, and there is no end of file while ranks come and go.
    const int fd = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("open of a pipe");
    return fd;
  }

  void open_streams() {
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
      files.rlim_cur = files.rlim_max;  // four for each rank
      setrlimit(RLIMIT_NOFILE, &files);
    }
    control_ = open_fifo("control");
    ranks_ = std::vector<RankState>(static_cast<size_t>(options_.ranks));
    for (int i = 0; i < options_.ranks; ++i) {
      RankState& r = ranks_[static_cast<size_t>(i)];
      const std::string base = "rank-" + std::to_string(i);
      r.out.fd = open_fifo(base + ".out");
      r.err.fd = open_fifo(base + ".err");
      r.log = open_log(base + ".log");
    }
    mpirun_log_ = open_log("mpirun.log");
    log_ = open_log("launch.log");
  }

  std::ofstream open_log(const std::string& name) {
    const std::string path = log_dir_ + "/" + name;
    std::ofstream file(path, std::ios::trunc);
    if (!file) throw Error(ErrorKind::kResource, "launcher", "cannot write " + path + ": " + std::strerror(errno));
    return file;
  }

  void say(const std::string& text) {
    log_ << text << std::endl;
    terminal_.write_line(Terminal::kErr, text);
  }

  void wait_for_events() {
    std::vector<pollfd> fds;
    const auto watch = [&](int fd) {
      if (fd >= 0) fds.push_back({fd, POLLIN, 0});
    };
    watch(signals_.fd);
    watch(control_);
    watch(mpirun_.fd);
    for (const RankState& r : ranks_) {
      watch(r.out.fd);
      watch(r.err.fd);
      watch(r.pidfd);
    }
    int timeout = -1;
    if (deadline_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*deadline_ - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60000));
    }
    poll(fds.data(), fds.size(), timeout);
  }

  void read_all() {
    read_signals();
    for (size_t i = 0; i < ranks_.size(); ++i) {
      // Output before the control pipe: what a rank printed comes before how it ended. Deaths before that: a rank that
      // died without a word is what the others then complain about.
      read_rank(i);
    }
    check_deaths();
    read_control();
    drain(mpirun_.fd, [&](std::string_view bytes) {
      mpirun_log_ << bytes << std::flush;
      mpirun_text_.append(bytes.substr(0, kKeptText - std::min(kKeptText, mpirun_text_.size())));
    });
    if (terminal_.broken() && !stop_signal_) interrupt(SIGPIPE);
  }

  // Reads what is there; closes mpirun's pipe at its end.
  template <typename Sink>
  void drain(int& fd, Sink&& sink) {
    std::array<char, 16384> buffer;
    // No more than a pipe holds: a rank that never stops printing must not keep signals and deadlines waiting.
    for (int i = 0; fd >= 0 && i < 16; ++i) {
      const ssize_t n = read(fd, buffer.data(), buffer.size());
      if (n > 0) {
        sink(std::string_view(buffer.data(), static_cast<size_t>(n)));
      } else if (n == 0) {
        close(fd);
        fd = -1;
      } else if (errno != EINTR) {
        return;
      }
    }
  }

  void read_rank(size_t i) {
    RankState& r = ranks_[i];
    drain(r.out.fd, [&](std::string_view bytes) { take(i, r.out, Terminal::kOut, bytes); });
    drain(r.err.fd, [&](std::string_view bytes) { take(i, r.err, Terminal::kErr, bytes); });
  }

  void take(size_t i, Source& source, Terminal::Stream stream, std::string_view bytes) {
    ranks_[i].shown = ++shown_;
    if (i == 0) {
      terminal_.write_raw(stream, bytes);
    } else {
      source.terminal.feed(bytes, [&](std::string_view line, bool replaced) {
        if (!replaced) terminal_.write_line(stream, prefix(i) + std::string(line));
      });
    }
    source.log.feed(bytes, [&](std::string_view line, bool replaced) { log_line(i, stream, line, replaced); });
    ranks_[i].log.flush();
  }

  std::string prefix(size_t i) const { return "[rank " + std::to_string(i) + "] "; }

  void log_line(size_t i, Terminal::Stream stream, std::string_view line, bool replaced) {
    RankState& r = ranks_[i];
    if (replaced) {
      // A live line is written over many times a second; one every ten seconds tells the story.
      const auto now = Clock::now();
      if (now - r.last_live < std::chrono::seconds(10)) return;
      r.last_live = now;
    }
    r.log << line << '\n';
    if (stream == Terminal::kErr) {
      r.tail.emplace_back(line);
      if (r.tail.size() > 10) r.tail.pop_front();
    }
  }

  void finish_lines() {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      for (const Terminal::Stream stream : {Terminal::kOut, Terminal::kErr}) {
        Source& source = stream == Terminal::kOut ? ranks_[i].out : ranks_[i].err;
        if (i != 0) {
          source.terminal.finish(
              [&](std::string_view line, bool) { terminal_.write_line(stream, prefix(i) + std::string(line)); });
        }
        source.log.finish([&](std::string_view line, bool) { log_line(i, stream, line, false); });
      }
      ranks_[i].log.flush();
    }
  }

  void read_signals() {
    signalfd_siginfo info{};
    while (read(signals_.fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      if (info.ssi_signo == SIGCHLD) {
        reap();
      } else {
        interrupt(static_cast<int>(info.ssi_signo));
      }
    }
  }

  void reap() {
    int status = 0;
    if (mpirun_code_ || waitpid(mpirun_pid_, &status, WNOHANG) != mpirun_pid_) return;
    mpirun_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (WIFSIGNALED(status)) mpirun_signal_ = WTERMSIG(status);
  }

  // Control lines, launcher/rank.cc: "start RANK PID", "exit RANK CODE MESSAGE" and "said RANK CODE".
  void read_control() {
    drain(control_, [&](std::string_view bytes) {
      control_lines_.feed(bytes, [&](std::string_view line, bool) { take_control(std::string(line)); });
    });
  }

  void take_control(const std::string& line) {
    long a = -1, b = 0;
    int used = 0;
    if (std::sscanf(line.c_str(), "start %ld %ld%n", &a, &b, &used) == 2 && a >= 0 && a < options_.ranks && b > 1) {
      RankState& r = ranks_[static_cast<size_t>(a)];
      r.started = true;
      if (r.pidfd < 0) r.pidfd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(b), 0));
      // A rank that started after the signal went out has missed it.
      if (stop_signal_ && r.pidfd >= 0) syscall(SYS_pidfd_send_signal, r.pidfd, SIGUSR1, nullptr, 0);
      return;
    }
    const bool said = std::sscanf(line.c_str(), "said %ld %ld%n", &a, &b, &used) == 2;
    if ((said || std::sscanf(line.c_str(), "exit %ld %ld%n", &a, &b, &used) == 2) && a >= 0 && a < options_.ranks) {
      RankState& r = ranks_[static_cast<size_t>(a)];
      if (r.reported) return;
      r.reported = true;
      if (b == 0) return;
      std::string message = line.substr(std::min(line.size(), static_cast<size_t>(used) + 1));
      std::replace(message.begin(), message.end(), '\1', '\n');
      if (!message.empty()) {
        r.log << "annulus: " << message << std::endl;
      }
      add_failure({static_cast<int>(a), static_cast<int>(b), message, said, false});
    }
  }

  // A rank that has ended and said nothing of it.
  void check_deaths() {
    bool control_read = false;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      RankState& r = ranks_[i];
      if (r.pidfd < 0) continue;
      pollfd dead{r.pidfd, POLLIN, 0};
      if (poll(&dead, 1, 0) != 1) continue;
      if (!control_read) {
        // Its last word, if there is one, was written before it died. Others' words wait: they may be complaints about
        // this death.
        control_read = true;
        read_control_of_the_dead();
      }
      read_rank(i);
      close(r.pidfd);
      r.pidfd = -1;
      if (!r.reported) add_failure({static_cast<int>(i), 0, "", false, true});
    }
  }

  // Collects control lines; abrupt deaths found in the same round are put in front of the failures that came with them.
  void read_control_of_the_dead() {
    const size_t before = failures_.size();
    read_control();
    std::vector<Failure> later(failures_.begin() + static_cast<std::ptrdiff_t>(before), failures_.end());
    failures_.resize(before);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      RankState& r = ranks_[i];
      if (r.pidfd < 0 || r.reported) continue;
      pollfd dead{r.pidfd, POLLIN, 0};
      if (poll(&dead, 1, 0) == 1) {
        r.reported = true;
        add_failure({static_cast<int>(i), 0, "", false, true});
      }
    }
    failures_.insert(failures_.end(), later.begin(), later.end());
  }

  void add_failure(Failure failure) {
    failures_.push_back(std::move(failure));
    // mpirun ends the others by itself; should it not, it is made to.
    if (!stop_signal_ && !deadline_) deadline_ = Clock::now() + kFailureGrace;
  }

  void interrupt(int signal) {
    if (mpirun_code_) return;  // all over; its pid may be another's by now
    if (!stop_signal_) {
      stop_signal_ = signal;
      const std::string name = signal == SIGINT    ? "Ctrl-C"
                               : signal == SIGPIPE ? "the output was closed"
                                                   : strsignal(signal);
      std::array<char, 160> text;
      std::snprintf(text.data(), text.size(), "annulus: %s: the ranks finish their step and stop%s", name.c_str(),
                    signal == SIGINT ? " (Ctrl-C again: at once)" : "");
      say(text.data());
      kill(mpirun_pid_, SIGUSR1);  // mpirun forwards it, also to other hosts
      deadline_ = Clock::now() +
                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.grace_seconds));
      return;
    }
    if (stage_ == Stage::kAsked) terminate();
  }

  void act_on_deadlines() {
    if (mpirun_code_ || !deadline_ || Clock::now() < *deadline_) return;
    if (stage_ == Stage::kAsked) {
      if (stop_signal_) {
        std::array<char, 120> text;
        std::snprintf(text.data(), text.size(), "annulus: the ranks did not stop within %g s and are ended now",
                      options_.grace_seconds);
        say(text.data());
      }
      terminate();
    } else {
      for (const RankState& r : ranks_) {
        if (r.pidfd >= 0) syscall(SYS_pidfd_send_signal, r.pidfd, SIGKILL, nullptr, 0);
      }
      kill(-mpirun_pid_, SIGKILL);
      deadline_ = Clock::now() + kTermGrace;
    }
  }

  void terminate() {
    stage_ = Stage::kTerminated;
    forced_ = true;
    kill(mpirun_pid_, SIGTERM);
    deadline_ = Clock::now() + kTermGrace;
  }

  // Says how the job ended and returns its exit code.
  int conclude() {
    if (mpirun_signal_ != 0 && !forced_ && !stop_signal_)
      say("annulus: mpirun was ended by " + signal_text(mpirun_signal_));
    const bool interrupted = stop_signal_ != 0;
    // Ranks that ended because they were asked to, or because others ended, are no failures.
    std::vector<Failure> told;
    for (const Failure& f : failures_) {
      const bool asked = interrupted && (f.abrupt || f.code >= 128);
      if (!asked) told.push_back(f);
    }
    int code = *mpirun_code_;
    // A rank that fails while it stops (a full disk, at its checkpoint) has failed.
    if (!told.empty() && !told.front().abrupt) {
      code = told.front().code;
    } else if (!failures_.empty() && !failures_.front().abrupt) {
      code = failures_.front().code;
    }
    if (!failures_.empty() && code == 0) code = 1;
    if (!told.empty()) {
      tell(told, code);
    } else if (code != 0 && !interrupted) {
      // No rank said anything: mpirun's own words are all there is.
      const bool any = std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& r) { return r.started; });
      say(std::string("annulus: mpirun ended with exit code ") + std::to_string(code) +
          (any ? "" : " before any rank started") + "; it said:");
      say(mpirun_text_.empty() ? "(nothing)" : mpirun_text_);
    }
    if (interrupted && code != 0 && (told.empty() || forced_)) {
      code = 128 + stop_signal_;
      say(forced_ ? "annulus: stopped; what was not in a finished checkpoint is lost" : "annulus: stopped");
      if (forced_ && options_.program.front() == "train") {
        say("annulus: to go on from the newest checkpoint: " + options_.typed +
            (options_.typed.find("--resume") == std::string::npos ? " --resume" : ""));
      }
    }
    if (code != 0) say("annulus: exit code " + std::to_string(code) + ", logs in " + log_dir_);
    log_ << "exit code " << code << std::endl;
    return code;
  }

  void tell(const std::vector<Failure>& told, int code) {
    const Failure& first = told.front();
    std::vector<int> same, other;
    for (const Failure& f : told) {
      const bool equal = f.abrupt == first.abrupt && f.code == first.code && f.message == first.message;
      // Ranks that die by a signal after the first were ended by mpirun.
      if (f.rank == first.rank || (equal && !f.abrupt)) {
        same.push_back(f.rank);
      } else if (!f.abrupt) {
        other.push_back(f.rank);
      }
    }
    const std::string who = options_.ranks == 1 ? "" : rank_list(same) + ": ";
    const RankState& state = ranks_[static_cast<size_t>(first.rank)];
    if (first.said) {
      // One rank has printed it for all.
    } else if (!first.message.empty()) {
      say("annulus: " + who + first.message);
    } else {
      std::string how = "ended with exit code " + std::to_string(code);
      if (first.abrupt && code > 128 && code < 128 + NSIG) how = "was ended by " + signal_text(code - 128);
      // Not again what the terminal has just shown.
      const bool repeat = !state.tail.empty() && shown_ - state.shown > 10;
      say("annulus: " + rank_list(same) + " " + how + (repeat ? "; its last lines:" : ""));
      if (repeat) {
        for (const std::string& line : state.tail) say("  " + line);
      }
    }
    if (!other.empty()) {
      log_ << "failed after it: " << rank_list(other) << std::endl;
      terminal_.write_line(Terminal::kErr, "annulus: " + rank_list(other) + " failed after it");
    }
  }

  enum class Stage { kAsked, kTerminated };
  static constexpr size_t kKeptText = 8000;  // of mpirun's own output

  const LaunchOptions& options_;
  const Signals& signals_;
  int64_t shown_ = 0;  // pieces of ranks' output that the terminal has shown
  const std::string session_dir_;
  const std::string log_dir_;
  Terminal terminal_;
  std::vector<RankState> ranks_;
  std::ofstream mpirun_log_, log_;
  int control_ = -1;
  LineSplitter control_lines_;
  Source mpirun_;
  std::string mpirun_text_;
  pid_t mpirun_pid_ = -1;
  std::optional<int> mpirun_code_;
  int mpirun_signal_ = 0;
  std::vector<Failure> failures_;  // in order of time
  int stop_signal_ = 0;            // 0: nobody asked to stop
  Stage stage_ = Stage::kAsked;
  bool forced_ = false;
  std::optional<Clock::time_point> deadline_;
};

// The variables of this program that ranks need, also on other hosts.
std::vector<std::string> forwarded_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (name.starts_with("ANNULUS_") || name == "OMP_NUM_THREADS") names.emplace_back(name);
  }
  names.emplace_back("ANNULUS_LAUNCH_MPIRUN");  // set when mpirun starts
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

int run_launch(const LaunchOptions& options) {
  if (launch_info().launched) {
    throw Error(ErrorKind::kUsage, "launcher",
                "`launch` inside a rank: this process was itself started by mpirun or srun, and would start ranks of "
                "ranks; give mpirun the verb without `launch`, or type `launch` without mpirun");
  }
  const Mpirun mpirun = find_mpirun();
  const HostPlan plan = plan_host(options.ranks);

  set_env("ANNULUS_WORLD_SIZE", std::to_string(options.ranks));
  set_env("ANNULUS_LAUNCH_COMMAND", options.typed);
  set_env("ANNULUS_PROGRAM", options.typed_program);  // ranks say it in the commands they suggest
  if (std::getenv("ANNULUS_PROGRESS") == nullptr)
    set_env("ANNULUS_PROGRESS", isatty(STDOUT_FILENO) == 1 ? "live" : "plain");
  MpirunRequest request;
  request.ranks = options.ranks;
  request.oversubscribe = plan.oversubscribed;
  request.as_root = geteuid() == 0;
  request.extra = options.mpi_args;
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorKind::kResource, "launcher", "cannot read /proc/self/exe: " + error.message());
  request.program = {self.string()};
  request.program.insert(request.program.end(), options.program.begin(), options.program.end());

  if (options.dry_run) {
    set_env("ANNULUS_LAUNCH_DIR", SessionDir::pattern());
    request.session_dir = SessionDir::pattern();
    request.forward = forwarded_variables();
    std::printf("%s\nOpen MPI %s would be started as (%s: a fresh folder):\n\n  %s\n", plan.table.c_str(),
                mpirun.version.c_str(), request.session_dir.c_str(),
                shell_quote(mpirun_command(mpirun, request)).c_str());
    return 0;
  }

  const Signals signals;
  const SessionDir session;
  const std::string log_dir = make_log_dir(options.log_dir);
  set_env("ANNULUS_LAUNCH_DIR", session.path());
  set_env("ANNULUS_LOG_DIR", log_dir);
  set_env("TMPDIR", session.path());  // Open MPI's session folder
  if (std::getenv("HOME") == nullptr) set_env("HOME", session.path());
  if (request.as_root) {
    set_env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    set_env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  request.session_dir = session.path();
  request.forward = forwarded_variables();
  const std::vector<std::string> command = mpirun_command(mpirun, request);

  Supervisor supervisor(options, signals, session.path(), log_dir);
  supervisor.log() << options.typed << "\n"
                   << now_text("%Y-%m-%d %H:%M:%S") << "\n\n"
                   << plan.table << "\n"
                   << shell_quote(command) << "\n\n"
                   << std::flush;
  supervisor.start(command);
  return supervisor.run();
}

}  // namespace annulus
