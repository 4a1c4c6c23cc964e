// See supervisor.h.
#include "launcher/launch/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "common/error.h"
#include "common/logging/log.h"
#include "common/logging/log_setup.h"
#include "common/text.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/launch/job_log.h"
#include "launcher/launch/pipes.h"
#include "launcher/launch/rank_streams.h"
#include "launcher/launch/terminal.h"
#include "launcher/launch/verdict.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

// The time that mpirun may take to end the ranks after SIGTERM, and the time in which a job must end by itself after
// its first rank failed.
constexpr std::chrono::seconds kTermGrace{5};
constexpr std::chrono::seconds kFailureGrace{15};

// How long the launcher waits, after mpirun has ended, for the last output of ranks on other hosts.
constexpr std::chrono::seconds kArrival{3};

struct RankState {
  int pidfd = -1;          // the process of a rank on the launcher's host
  int control = -1;        // the connection of a rank on another host, which ends with the rank
  bool connected = false;  // there was such a connection, and find_dead has not yet seen its end
  LineSplitter words;      // lines from `control`
  bool started = false;
  bool reported = false;  // whether its end is known
  std::string host;       // where it runs
  std::string record;     // the pieces of a record whose last piece has not come
  int number = 0;         // its rank in the job, which differs from that of mpirun if bootstrap renumbers the ranks
};

class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const Signals& signals, const std::string& session_dir,
             const std::string& log_dir, BackChannel* channel)
      : options_(options),
        signals_(signals),
        channel_(channel),
        log_dir_(log_dir),
        terminal_(STDOUT_FILENO, STDERR_FILENO),
        streams_(options.ranks, session_dir, log_dir, terminal_),
        ranks_(static_cast<size_t>(options.ranks)),
        job_log_(log_dir, json_) {
    for (size_t i = 0; i < ranks_.size(); ++i) ranks_[i].number = static_cast<int>(i);
    control_ = open_fifo(session_dir + "/control");
    mpirun_log_ = LogFile(log_dir, "mpirun.log");
    log_ = LogFile(log_dir, "launch.log");
    streams_.on_error_line(/*instead=*/json_, [this](int rank, std::string_view line) { take_error_line(rank, line); });
    for (const LogRecord& record : take_early_records()) job_log_.add(record);
    set_log_console([this](const LogRecord& record, bool shown) { take_own(record, shown); });
  }

  ~Supervisor() {
    set_log_console(nullptr);
    for (const RankState& r : ranks_) {
      if (r.pidfd >= 0) close(r.pidfd);
      if (r.control >= 0) close(r.control);
    }
    for (int fd : {control_, mpirun_}) {
      if (fd >= 0) close(fd);
    }
  }

  void start(const std::vector<std::string>& command, const std::string& heading) {
    log_.add(heading);
    log_.flush();
    try {
      const MpirunProcess process = start_mpirun(command, signals_.before);
      mpirun_pid_ = process.pid;
      mpirun_ = process.output;
    } catch (const Error& error) {
      log_unshown(LogLevel::kError, error.room(), error.message());  // run_program shows it
      throw;
    }
  }

  // Runs until mpirun has ended and nothing is left to read. Returns the exit code.
  int run() {
    while (!mpirun_code_) {
      wait_for_events();
      read_all();
      act_on_deadlines();
    }
    read_all();
    deadline_ = Clock::now() + kArrival;
    while (expects_more() && Clock::now() < *deadline_) {
      wait_for_events();
      read_all();
    }
    for (RankState& r : ranks_) {
      if (r.pidfd >= 0) syscall(SYS_pidfd_send_signal, r.pidfd, SIGKILL, nullptr, 0);  // one that outlived mpirun
    }
    streams_.finish();
    return conclude();
  }

 private:
  // Receives every record of the launcher itself (set_log_console).
  void take_own(const LogRecord& record, bool shown) {
    job_log_.add(record);
    if (!shown) return;
    log_.add(plain_text(record) + "\n");
    log_.flush();
    terminal_.write_line(Terminal::kErr, json_ ? json_text(record) : plain_text(record));
  }

  // Receives a record of a rank: a character with flags (send_record in launcher/launch/rank.cc), then JSON.
  void take_record(int rank, std::string_view text) {
    if (text.empty()) return;
    std::optional<LogRecord> record = record_from_json(text.substr(1));
    if (!record) {
      streams_.note(rank, "annulus: a record that cannot be read: " + std::string(text.substr(1)));
      return;
    }
    const bool shown = (text.front() & 1) != 0;
    record->of_one = (text.front() & 2) != 0;
    job_log_.add(*record);
    if (!shown) return;
    const std::string line = json_ ? json_text(*record) : plain_text(*record);
    if (job_log_.is_news(*record)) {
      streams_.say(rank, line, /*bare=*/json_);
    } else {
      streams_.note(rank, line);
    }
  }

  // Makes a record of a line that a rank, or a library in it, printed to standard error. Its time is that of arrival.
  void take_error_line(int rank, std::string_view line) {
    const RankState& r = ranks_[static_cast<size_t>(rank)];
    const LogRecord record{.time = std::chrono::system_clock::now(),
                           .host = r.host,
                           .rank = r.number,
                           .room = "stderr",
                           .message = std::string(line)};
    job_log_.add(record);
    if (json_) terminal_.write_line(Terminal::kErr, json_text(record));
  }

  void wait_for_events() {
    std::vector<pollfd> fds;
    const auto watch = [&](int fd) {
      if (fd >= 0) fds.push_back({fd, POLLIN, 0});
    };
    watch(signals_.fd);
    watch(control_);
    watch(mpirun_);
    streams_.watch(fds);
    for (const RankState& r : ranks_) {
      watch(r.pidfd);
      watch(r.control);
    }
    if (channel_ != nullptr) {
      watch(channel_->fd());
      for (const int fd : channel_->pending()) watch(fd);
    }
    int timeout = -1;
    if (deadline_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*deadline_ - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60000));
    }
    poll(fds.data(), fds.size(), timeout);
  }

  bool expects_more() const {
    return streams_.expects_more() ||
           std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& r) { return r.control >= 0; });
  }

  // Accepts connections from ranks on other hosts.
  void accept_ranks() {
    if (channel_ == nullptr) return;
    for (const BackChannel::Caller& caller : channel_->accept()) {
      if (caller.kind != "rank" || caller.number >= options_.ranks) {
        close(caller.fd);
      } else if (caller.stream == "control") {
        RankState& r = ranks_[static_cast<size_t>(caller.number)];
        if (r.control >= 0) close(r.control);
        r.control = caller.fd;
        r.connected = true;
      } else {
        streams_.adopt(caller.number, caller.stream == "out" ? Terminal::kOut : Terminal::kErr, caller.fd);
      }
    }
  }

  void read_all() {
    read_signals();
    accept_ranks();
    // The host and number of a rank are learnt before its output is read. The other control lines that have come by now
    // wait for that output, so that what a rank printed comes before how it ended.
    read_control();
    streams_.read_all();
    read_ends();
    drain(mpirun_, [&](std::string_view bytes) {
      mpirun_log_.add(bytes);
      mpirun_log_.flush();
      mpirun_text_.append(bytes.substr(0, kKeptText - std::min(kKeptText, mpirun_text_.size())));
    });
    if (terminal_.error() != 0 && !stop_signal_) interrupt(SIGPIPE);
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

  // Reads control lines, which launcher/launch/rank.cc writes: "start RANK PID HOST", "number RANK RANK_IN_JOB", "exit
  // RANK CODE", "failed RANK ERROR", "said RANK ERROR", "follows RANK FAILED_RANK_IN_JOB ERROR", "kept RANK WORDS"
  // after any number of "keeps RANK WORDS", and "log RANK RECORD" after any number of "logs RANK RECORD". The first two
  // are obeyed at once, the others by take_waiting().
  void read_control() {
    const auto take = [&](std::string_view text, bool) {
      std::string line(text);
      if (!take_place(line)) waiting_.push_back(std::move(line));
    };
    drain(control_, [&](std::string_view bytes) { control_lines_.feed(bytes, take); });
    for (RankState& r : ranks_) {
      drain(r.control, [&](std::string_view bytes) { r.words.feed(bytes, take); });
    }
  }

  void take_waiting() {
    for (const std::string& line : std::exchange(waiting_, {})) take_control(line);
  }

  // Takes a line about the place of a rank; returns false for any other line.
  bool take_place(const std::string& line) {
    long a = -1, b = 0;
    int used = 0;
    if (std::sscanf(line.c_str(), "number %ld %ld", &a, &b) == 2) {
      if (a >= 0 && a < options_.ranks && b >= 0 && b < options_.ranks)
        ranks_[static_cast<size_t>(a)].number = static_cast<int>(b);
      return true;
    }
    if (std::sscanf(line.c_str(), "start %ld %ld%n", &a, &b, &used) == 2 && a >= 0 && a < options_.ranks && b > 1) {
      RankState& r = ranks_[static_cast<size_t>(a)];
      r.started = true;
      r.host = line.substr(std::min(line.size(), static_cast<size_t>(used) + 1));
      if (r.control < 0 && r.pidfd < 0) r.pidfd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(b), 0));
      // A rank that started after the signal was sent has missed it. For the other ranks, a second signal changes
      // nothing.
      if (stop_signal_ && r.pidfd >= 0) syscall(SYS_pidfd_send_signal, r.pidfd, SIGUSR1, nullptr, 0);
      if (stop_signal_ && r.control >= 0 && !mpirun_code_) kill(mpirun_pid_, SIGUSR1);
      return true;
    }
    return false;
  }

  void take_control(const std::string& line) {
    long a = -1, b = 0;
    int used = 0;
    const bool whole = std::sscanf(line.c_str(), "kept %ld%n", &a, &used) == 1;
    if (whole || std::sscanf(line.c_str(), "keeps %ld%n", &a, &used) == 1) {
      kept_text_ += line.substr(std::min(line.size(), static_cast<size_t>(used) + 1));
      if (whole) kept_ = words_of_line(std::exchange(kept_text_, ""));
      return;
    }
    const bool record = std::sscanf(line.c_str(), "log %ld%n", &a, &used) == 1;
    if (record || std::sscanf(line.c_str(), "logs %ld%n", &a, &used) == 1) {
      if (a < 0 || a >= options_.ranks) return;
      std::string& text = ranks_[static_cast<size_t>(a)].record;
      text += line.substr(std::min(line.size(), static_cast<size_t>(used) + 1));
      if (record) take_record(static_cast<int>(a), std::exchange(text, ""));
      return;
    }
    const bool said = std::sscanf(line.c_str(), "said %ld%n", &a, &used) == 1;
    long cause = -1;
    const bool follows = std::sscanf(line.c_str(), "follows %ld %ld%n", &a, &cause, &used) == 2;
    std::optional<Error> error;
    if (said || follows || std::sscanf(line.c_str(), "failed %ld%n", &a, &used) == 1) {
      std::string text = line.substr(std::min(line.size(), static_cast<size_t>(used) + 1));
      std::replace(text.begin(), text.end(), '\1', '\n');
      error = Error::from_wire(text).value_or(
          Error(ErrorKind::kInternal, "launcher", "failed with a report that cannot be read: " + text));
      b = error->exit_code();
    } else if (std::sscanf(line.c_str(), "exit %ld %ld", &a, &b) != 2) {
      return;
    }
    if (a < 0 || a >= options_.ranks) return;
    RankState& r = ranks_[static_cast<size_t>(a)];
    if (r.reported) return;
    r.reported = true;
    if (b == 0) return;
    if (error && !said) streams_.note(static_cast<int>(a), "annulus: " + std::string(error->what()));
    add_failure({static_cast<int>(a), static_cast<int>(b), error ? error->what() : "", said, false,
                 follows && cause >= 0 && cause < options_.ranks ? static_cast<int>(cause) : -1});
  }

  // Finds out which ranks have ended. Ranks that died without a report come before those that reported an error,
  // because that error may be a consequence of these deaths.
  void read_ends() {
    const size_t before = failures_.size();
    std::vector<size_t> dead;
    // Repeated until nothing is new: a rank that an error complains about died before the error was sent, and a dead
    // rank sent its last report before it died.
    for (bool more = true; more;) {
      const size_t known = failures_.size() + dead.size();
      read_control();
      take_waiting();
      find_dead(dead);
      more = failures_.size() + dead.size() > known;
    }
    const std::vector<RankEnd> later(failures_.begin() + static_cast<std::ptrdiff_t>(before), failures_.end());
    failures_.resize(before);
    for (const size_t i : dead) {
      streams_.read(static_cast<int>(i));
      if (ranks_[i].reported) continue;
      ranks_[i].reported = true;
      add_failure({static_cast<int>(i), 0, "", false, true});
    }
    failures_.insert(failures_.end(), later.begin(), later.end());
  }

  // Adds ranks that have ended since the last call: on the launcher's host those whose process has ended, on other
  // hosts those whose connection has ended.
  void find_dead(std::vector<size_t>& dead) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      RankState& r = ranks_[i];
      pollfd ended{r.pidfd, POLLIN, 0};
      const bool here = r.pidfd >= 0 && poll(&ended, 1, 0) == 1;
      if (here) close(std::exchange(r.pidfd, -1));
      const bool elsewhere = r.connected && r.control < 0;
      if (elsewhere) r.connected = false;
      if (here || elsewhere) dead.push_back(i);
    }
  }

  void add_failure(RankEnd failure) {
    failures_.push_back(std::move(failure));
    // mpirun ends the other ranks by itself. If it does not by this deadline, it is terminated.
    if (!stop_signal_ && !deadline_) deadline_ = Clock::now() + kFailureGrace;
  }

  void interrupt(int signal) {
    if (mpirun_code_) return;  // mpirun has ended, and its pid may belong to another process by now
    if (!stop_signal_) {
      stop_signal_ = signal;
      log_warn("", stop_reason(signal, terminal_.error()) + ": the ranks finish their step and stop" +
                       (signal == SIGINT ? " (press Ctrl-C again to end them at once)" : ""));
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
        log_warn("", "the ranks did not stop within " + exact(options_.grace_seconds) + " s and are terminated now");
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
    JobEnd end;
    end.ranks = options_.ranks;
    end.failed = failures_;
    for (RankEnd& failure : end.failed) failure.rank = ranks_[static_cast<size_t>(failure.rank)].number;
    end.unseen.resize(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      end.unseen[static_cast<size_t>(ranks_[i].number)] = streams_.unseen(static_cast<int>(i));
    }
    end.mpirun_code = *mpirun_code_;
    end.mpirun_signal = mpirun_signal_;
    end.mpirun_said = mpirun_text_;
    end.any_started = std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& r) { return r.started; });
    end.stop_signal = stop_signal_;
    end.forced = forced_;
    end.output_error = terminal_.error();
    end.quiet = !log_enabled(LogLevel::kInfo);
    if (kept_.size() > 2) {  // no command: the run is complete
      end.resume =
          resume_point(std::strtoll(kept_[0].c_str(), nullptr, 10), kept_[1], {kept_.begin() + 2, kept_.end()});
    }
    end.log_dir = log_dir_;
    const Verdict verdict = judge(end);
    const LogLevel level = end.stop_signal != 0 && !verdict.failed ? LogLevel::kWarn : LogLevel::kError;
    for (const std::string& message : messages_of(verdict.words)) log(level, "", message);
    log_.add("exit code " + std::to_string(verdict.code) + "\n");
    log_.flush();
    say_lost_logs();
    job_log_.merge(verdict.culprit);
    return verdict.code;
  }

  // Reports incomplete logs once. The job's exit code stays the same, because its results are not affected.
  void say_lost_logs() {
    std::vector<std::string> lost = streams_.lost_logs();
    for (const std::string& file : {mpirun_log_.lost(), log_.lost(), job_log_.lost()}) {
      if (!file.empty()) lost.push_back(file);
    }
    if (lost.empty()) return;
    const size_t others = lost.size() - 1;
    log_warn("",
             "lines are missing in the log file " + lost.front() +
                 (others == 0 ? "" : " (and in " + std::to_string(others) + (others == 1 ? " other)" : " others)")));
  }

  enum class Stage { kAsked, kTerminated };
  static constexpr size_t kKeptText = 8000;  // bytes of mpirun's own output that are kept

  const LaunchOptions& options_;
  const Signals& signals_;
  BackChannel* const channel_;  // null: all ranks are on this host
  const std::string log_dir_;
  Terminal terminal_;
  RankStreams streams_;
  std::vector<RankState> ranks_;
  LogFile mpirun_log_, log_;
  const bool json_ = log_settings().json;
  JobLog job_log_;
  int control_ = -1;
  LineSplitter control_lines_;
  std::vector<std::string> waiting_;  // control lines that have not been obeyed yet
  std::string kept_text_;             // the pieces so far of a "kept" message
  std::vector<std::string> kept_;     // the last such message: step, folder, the words of a command
  int mpirun_ = -1;                   // a pipe with mpirun's own output
  std::string mpirun_text_;
  pid_t mpirun_pid_ = -1;
  std::optional<int> mpirun_code_;
  int mpirun_signal_ = 0;
  std::vector<RankEnd> failures_;  // in the order of time
  int stop_signal_ = 0;            // 0: no request to stop
  Stage stage_ = Stage::kAsked;
  bool forced_ = false;
  std::optional<Clock::time_point> deadline_;
};

}  // namespace

int supervise(const std::vector<std::string>& command, const LaunchOptions& options, const Signals& signals,
              const std::string& session_dir, const std::string& log_dir, const std::string& heading,
              BackChannel* channel) {
  Supervisor supervisor(options, signals, session_dir, log_dir, channel);
  supervisor.start(command, heading);
  return supervisor.run();
}

}  // namespace annulus
