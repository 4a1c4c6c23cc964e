// See supervisor.h.
#include "launcher/launch/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/logging/log_setup.h"
#include "common/text.h"
#include "launcher/hosts/mpirun_process.h"
#include "launcher/hosts/sockets.h"
#include "launcher/launch/exit_report.h"
#include "launcher/launch/job_log.h"
#include "launcher/launch/rank.h"
#include "launcher/launch/rank_messages.h"
#include "launcher/launch/rank_streams.h"
#include "launcher/launch/terminal.h"
#include "launcher/launch/watchers.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

// The time that mpirun may take to end the ranks after SIGTERM, and the time in which a job must end by itself after
// its first rank failed.
constexpr std::chrono::seconds kTermGrace{5};
constexpr std::chrono::seconds kFailureGrace{15};
// The time in which other faults may become known after the first, which are said as well, before the ranks are ended.
constexpr std::chrono::seconds kFaultGrace{1};

// How long the launcher waits, after mpirun has ended, for the last output of the ranks.
constexpr std::chrono::seconds kArrival{3};

// How many messages of one rank are read at once, so that a rank that sends without pause delays neither signals nor
// deadlines. The rest stays in the socket, for which poll() then does not wait.
constexpr int kMostMessages = 256;
// How often that is repeated if a rank has failed, for the ends of others to be seen. The socket of a rank that died
// holds fewer messages.
constexpr int kMostRounds = 64;

struct RankState {
  int control = -1;       // the connection that the rank sends messages through, which ends with the rank
  std::string line;       // what has come of the next message
  int error = 0;          // the errno with which the connection has ended
  bool reported = false;  // whether its end is known
  std::string host;       // where it runs; empty: it has not started
  int number = 0;         // its rank in the job, which differs from that of mpirun if bootstrap renumbers the ranks
};

class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const Signals& signals, const std::string& log_dir, LauncherSocket& socket)
      : options_(options),
        signals_(signals),
        socket_(socket),
        log_dir_(log_dir),
        terminal_(STDOUT_FILENO, STDERR_FILENO),
        streams_(options.ranks, log_dir, terminal_),
        ranks_(options.ranks),
        watchers_(process_place(), [this](size_t rank) { return ranks_[rank].number; }),
        job_log_(log_dir, json_) {
    for (size_t i = 0; i < ranks_.size(); ++i) ranks_[i].number = static_cast<int>(i);
    mpirun_log_ = LogFile(log_dir, "mpirun.log");
    log_ = LogFile(log_dir, "launch.log");
    streams_.on_error_line(/*instead=*/json_, [this](int rank, std::string_view line) { take_error_line(rank, line); });
    streams_.on_arrival([this](int rank) { read_control(static_cast<size_t>(rank)); });
    for (const LogRecord& record : take_early_records()) job_log_.add(record);
    set_log_console([this](const LogRecord& record, bool shown) { take_own(record, shown); });
  }

  ~Supervisor() {
    set_log_console(nullptr);
    for (const RankState& r : ranks_) {
      if (r.control >= 0) close(r.control);
    }
  }

  void start(const std::vector<std::string>& command, const std::string& heading) {
    log_.add(heading);
    log_.flush();
    try {
      mpirun_ = MpirunProcess(command, signals_.before);
    } catch (const Error& error) {
      log_unshown(LogLevel::kError, error.module(), error.message());  // run_program shows it
      throw;
    }
  }

  // Runs until mpirun has ended and nothing is left to read.
  Attempt run() {
    while (mpirun_.running()) {
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

  void take_record(int rank, const std::string& text, bool shown, bool of_one) {
    std::optional<LogRecord> record = record_from_json(text);
    if (!record) {
      streams_.note(rank, "annulus: a record that cannot be read: " + text);
      return;
    }
    record->of_one = of_one;
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
    const RankState& r = ranks_[rank];
    const LogRecord record{.time = std::chrono::system_clock::now(),
                           .host = r.host,
                           .rank = r.number,
                           .module = "stderr",
                           .message = std::string(line)};
    job_log_.add(record);
    if (json_) terminal_.write_line(Terminal::kErr, json_text(record));
  }

  void wait_for_events() {
    std::vector<pollfd> fds = {{signals_.fd, POLLIN, 0}};
    mpirun_.watch(fds);
    streams_.watch(fds);
    socket_.watch(fds);
    watchers_.watch(fds);
    for (const RankState& r : ranks_) {
      if (r.control >= 0) fds.push_back({r.control, POLLIN, 0});
    }
    poll_until(fds, earlier(deadline_, socket_.deadline()));
  }

  bool expects_more() const {
    return streams_.expects_more() || watchers_.open() ||
           std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& r) { return r.control >= 0; });
  }

  void accept_ranks() {
    for (const LauncherSocket::Connection& connection : socket_.accept()) {
      const bool control = connection.purpose == "control", out = connection.purpose == "out";
      const bool watch = connection.purpose == "watch";
      if (connection.number >= options_.ranks || !(control || out || watch || connection.purpose == "err")) {
        close(connection.fd);
      } else if (watch) {
        watchers_.add_watcher(static_cast<size_t>(connection.number), connection.fd);
      } else if (control) {
        RankState& r = ranks_[connection.number];
        if (r.control >= 0) close(r.control);
        r.control = connection.fd;
      } else {
        streams_.adopt(connection.number, out ? Terminal::kOut : Terminal::kErr, connection.fd);
      }
    }
  }

  void read_all() {
    while (const int signal = signals_.take_request()) interrupt(signal);
    accept_ranks();
    // The host and number of a rank are learnt before its output is taken (on_arrival). The other messages that have
    // come by now wait for that output, so that what a rank printed comes before how it ended.
    read_control();
    streams_.read_all();
    read_ends();
    watchers_.read();
    take_faults();
    mpirun_log_.add(mpirun_.read());
    mpirun_log_.flush();
    if (terminal_.error() != 0 && !stop_signal_) interrupt(SIGPIPE);
  }

  // Reads the messages of the ranks (rank.h). Those about a rank's place are obeyed at once, the others by
  // take_waiting(). Returns whether there may be more to read now.
  bool read_control() {
    bool more = false;
    for (size_t i = 0; i < ranks_.size(); ++i) more = read_control(i) || more;
    return more;
  }

  // The same for one rank.
  bool read_control(size_t i) {
    RankState& r = ranks_[i];
    LineState state = LineState::kWaiting;
    for (int n = 0; r.control >= 0 && n < kMostMessages; ++n) {
      if ((state = read_line(r.control, r.line)) != LineState::kWhole) break;
      try {
        RankMessage message = rank_message_of(std::exchange(r.line, ""), options_.ranks);
        if (!take_place(i, message)) waiting_.emplace_back(i, std::move(message));
      } catch (const Error& error) {
        streams_.note(static_cast<int>(i), "annulus: " + std::string(error.message()));
      }
    }
    if (state == LineState::kClosed) {
      r.error = errno;
      close(std::exchange(r.control, -1));
      ended_.push_back(i);
    }
    return state == LineState::kWhole;
  }

  void take_waiting() {
    for (const auto& [rank, message] : std::exchange(waiting_, {})) take_message(static_cast<int>(rank), message);
  }

  // Takes a message about the place of a rank; returns false for any other.
  bool take_place(size_t i, const RankMessage& message) {
    if (const auto* is = std::get_if<RankNumber>(&message)) {
      ranks_[i].number = is->number;
      return true;
    }
    const auto* started = std::get_if<RankStarted>(&message);
    if (started == nullptr) return false;
    ranks_[i].host = started->host;
    if (!started->beat.is_null()) {
      watchers_.add_rank(i, started->host, CheckedJson(started->beat, "launcher", "a message"));
    }
    // A rank that started after the signal was sent has missed it. For the other ranks, a second signal changes
    // nothing.
    if (stop_signal_) mpirun_.send(SIGUSR1);
    return true;
  }

  void take_message(int rank, const RankMessage& message) {
    if (const auto* of_log = std::get_if<RankRecord>(&message)) {
      take_record(rank, of_log->text, of_log->shown, of_log->of_one);
    } else if (const auto* done = std::get_if<RankProgress>(&message)) {
      step_ = done->step;
    } else if (const auto* saved = std::get_if<RankCheckpoint>(&message)) {
      checkpoint_ = *saved;
    } else if (const auto* failed = std::get_if<RankFailure>(&message)) {
      const std::string text = failed->error.what();
      if (!failed->reported && !ranks_[static_cast<size_t>(rank)].reported) streams_.note(rank, "annulus: " + text);
      take_end({rank, failed->error.exit_code(), text, failed->reported, false, failed->cause});
    } else if (const auto* ended = std::get_if<RankExit>(&message)) {
      take_end({rank, ended->code, "", false});
    }
  }

  void take_end(RankEnd end) {
    if (std::exchange(ranks_[end.rank].reported, true)) return;
    if (end.code != 0 || end.abrupt) add_failure(std::move(end));
  }

  // Finds out which ranks have ended. Ranks that died without a report come before those that reported an error,
  // because that error may be a consequence of these deaths.
  void read_ends() {
    const size_t before = failures_.size();
    // Repeated until nothing is new: a rank that an error complains about died before the error was sent, and a dead
    // rank sent its last message before it died.
    size_t known = 0;
    bool more = false;
    int rounds = 0;
    do {
      known = failures_.size() + ended_.size();
      more = read_control();
      take_waiting();
    } while (failures_.size() + ended_.size() > known || (failures_.size() > before && more && ++rounds < kMostRounds));
    const std::vector<RankEnd> later(failures_.begin() + before, failures_.end());
    failures_.resize(before);
    for (const size_t i : std::exchange(ended_, {})) {
      streams_.read(static_cast<int>(i));
      watchers_.rank_ended(i, ranks_[i].error, ranks_[i].reported);
      take_end({static_cast<int>(i), 0, "", false, true});
    }
    failures_.insert(failures_.end(), later.begin(), later.end());
  }

  void add_failure(RankEnd failure) {
    failures_.push_back(std::move(failure));
    // mpirun ends the other ranks by itself. If it does not by this deadline, it is terminated.
    if (!stop_signal_ && !deadline_) deadline_ = Clock::now() + kFailureGrace;
  }

  // Says which ranks stand still and which hosts are lost, and has the ranks ended, unless a rank has reported another
  // error before.
  void take_faults() {
    // Daemons and ranks end with an mpirun that is killed.
    const bool killed = !mpirun_.running() && mpirun_.exit_signal() != 0;
    const bool explained = killed || std::any_of(failures_.begin(), failures_.end(), [](const RankEnd& f) {
                             return !f.abrupt && f.code != static_cast<int>(ErrorKind::kComm);
                           });
    for (const Watchers::Fault& fault : watchers_.take_faults()) {
      if (explained) continue;
      log(LogLevel::kError, "", fault.text);
      if (!faulty_) faulty_ = fault.rank;
      const Clock::time_point soon = Clock::now() + kFaultGrace;
      if (!stop_signal_ && stage_ == Stage::kAsked) deadline_ = deadline_ ? std::min(*deadline_, soon) : soon;
    }
  }

  void interrupt(int signal) {
    if (!mpirun_.running()) return;
    if (!stop_signal_) {
      stop_signal_ = signal;
      log_warn("", stop_reason(signal, terminal_.error()) + ": the ranks finish their step and stop" +
                       (signal == SIGINT ? " (press Ctrl-C again to end them at once)" : ""));
      mpirun_.send(SIGUSR1);  // mpirun forwards it, also to other hosts
      deadline_ = Clock::now() +
                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.grace_seconds));
      return;
    }
    if (stage_ == Stage::kAsked) terminate();
  }

  void act_on_deadlines() {
    if (!mpirun_.running() || !deadline_ || Clock::now() < *deadline_) return;
    if (stage_ == Stage::kAsked) {
      if (stop_signal_) {
        log_warn("", "the ranks did not stop within " + exact(options_.grace_seconds) + " s and are terminated now");
      }
      terminate();
    } else {
      mpirun_.send_to_group(SIGKILL);  // the ranks end with it
      deadline_ = Clock::now() + kTermGrace;
    }
  }

  void terminate() {
    stage_ = Stage::kTerminated;
    forced_ = true;
    mpirun_.send(SIGTERM);
    deadline_ = Clock::now() + kTermGrace;
  }

  // Says how the job ended.
  Attempt conclude() {
    JobEnd end;
    end.ranks = options_.ranks;
    end.failed = failures_;
    for (RankEnd& failure : end.failed) {
      failure.memory = failure.abrupt && watchers_.ended_for_memory(static_cast<size_t>(failure.rank));
      failure.rank = ranks_[failure.rank].number;
    }
    if (faulty_) end.faulty = ranks_[*faulty_].number;
    end.unseen.resize(ranks_.size());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      end.unseen[ranks_[i].number] = streams_.unseen(static_cast<int>(i));
    }
    end.mpirun_code = mpirun_.exit_code();
    end.mpirun_signal = mpirun_.exit_signal();
    end.mpirun_output = mpirun_.text();
    end.any_started = std::any_of(ranks_.begin(), ranks_.end(), [](const RankState& r) { return !r.host.empty(); });
    end.stop_signal = stop_signal_;
    end.forced = forced_;
    end.output_error = terminal_.error();
    end.quiet = !log_enabled(LogLevel::kInfo);
    if (!checkpoint_.command.empty()) {  // no command: the run is complete
      end.resume = resume_point(checkpoint_.step, checkpoint_.folder, checkpoint_.command);
    }
    end.log_dir = log_dir_;
    const ExitReport report = exit_report_of(end);
    const LogLevel level = end.stop_signal != 0 && !report.failed ? LogLevel::kWarn : LogLevel::kError;
    for (const std::string& message : report.messages) log(level, "", message);
    log_.add("exit code " + std::to_string(report.code) + "\n");
    log_.flush();
    say_lost_logs();
    job_log_.merge(report.failed_rank);
    return {.code = report.code,
            .stopped = stop_signal_ != 0 || terminal_.error() != 0,
            .step = step_,
            .resume = end.resume};
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

  const LaunchOptions& options_;
  const Signals& signals_;
  LauncherSocket& socket_;
  const std::string log_dir_;
  Terminal terminal_;
  RankStreams streams_;
  std::vector<RankState> ranks_;
  Watchers watchers_;
  LogFile mpirun_log_, log_;
  const bool json_ = log_settings().json;
  JobLog job_log_;
  std::vector<std::pair<size_t, RankMessage>> waiting_;  // ranks and their messages that have not been obeyed yet
  std::vector<size_t> ended_;                            // ranks whose connection has ended
  RankCheckpoint checkpoint_;                            // the last one that was reported
  std::optional<int64_t> step_;                          // of training, the last one that was reported
  MpirunProcess mpirun_;
  std::vector<RankEnd> failures_;  // in the order of time
  int stop_signal_ = 0;            // 0: no request to stop
  Stage stage_ = Stage::kAsked;
  bool forced_ = false;
  std::optional<size_t> faulty_;  // the rank that was first found to stand still, or to be on a lost host
  std::optional<Clock::time_point> deadline_;
};

}  // namespace

Attempt supervise(const std::vector<std::string>& command, const LaunchOptions& options, const Signals& signals,
                  const std::string& log_dir, const std::string& heading, LauncherSocket& socket) {
  Supervisor supervisor(options, signals, log_dir, socket);
  supervisor.start(command, heading);
  return supervisor.run();
}

}  // namespace annulus
