// See survey.h: the launcher's side. The other: survey_answer.cc.
#include "launcher/hosts/survey.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/sockets.h"
#include "launcher/hosts/survey_words.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr int kClockRounds = 8;
constexpr size_t kKeptText = 20000;                  // of what mpirun says
constexpr size_t kMostTried = 16;                    // hosts that are started alone at the same time
constexpr std::chrono::seconds kTryTime{30};         // for all of them
constexpr std::chrono::milliseconds kLookTime{200};  // between two looks for the user's wish to stop

std::string own_program() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorKind::kResource, "launcher", "cannot read /proc/self/exe: " + error.message());
  return self.string();
}

// A running mpirun with what it has said; ended with this object.
class Child {
 public:
  Child() = default;
  explicit Child(const std::vector<std::string>& command) {
    // It gets signals even where the caller takes its own from a descriptor.
    sigset_t none;
    sigemptyset(&none);
    process_ = start_mpirun(command, none);
  }
  Child(Child&& other) noexcept : process_(std::exchange(other.process_, {})), text_(std::move(other.text_)) {}
  Child& operator=(Child&& other) noexcept {
    std::swap(process_, other.process_);
    std::swap(text_, other.text_);
    return *this;
  }
  ~Child() { end(); }

  int output() const { return process_.output; }
  const std::string& text() const { return text_; }

  // Takes what was said; false once it has ended.
  bool read_output() {
    std::array<char, 4096> buffer;
    while (process_.output >= 0) {
      const ssize_t n = read(process_.output, buffer.data(), buffer.size());
      if (n > 0) {
        text_.append(buffer.data(), std::min(static_cast<size_t>(n), kKeptText - std::min(kKeptText, text_.size())));
      } else if (n < 0 && errno == EINTR) {
      } else if (n < 0 && errno == EAGAIN) {
        return true;
      } else {
        close(std::exchange(process_.output, -1));
      }
    }
    return false;
  }

  // Its exit code; ends it where it still runs, within a few seconds.
  int end() {
    if (process_.pid <= 0) return -1;
    if (process_.output >= 0) {
      kill(process_.pid, SIGTERM);
      const Clock::time_point deadline = Clock::now() + std::chrono::seconds(3);
      while (read_output() && wait_for(process_.output, POLLIN, deadline)) {
      }
      kill(-process_.pid, SIGKILL);
      if (process_.output >= 0) close(process_.output);
    }
    int status = 0;
    while (waitpid(process_.pid, &status, 0) < 0 && errno == EINTR) {
    }
    process_ = {};
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  MpirunProcess process_;
  std::string text_;
};

// For mpirun's own files: $TMPDIR may be too long for its sockets. Named and locked as a launch's folder, so that the
// next launch removes what a survey that was killed has left (launcher/launch/session_dir.cc).
class Folder {
 public:
  Folder()
      : path_((access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : "/tmp") + std::string("/annulus-") +
              std::to_string(getuid()) + "-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw Error(ErrorKind::kResource, "launcher", "cannot make a folder like " + path_ + ": " + std::strerror(errno));
    }
    lock_ = open((path_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock_ >= 0) flock(lock_, LOCK_EX | LOCK_NB);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
    if (lock_ >= 0) close(lock_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;
};

// The connection to one host.
struct Line {
  int fd = -1;
  std::string text;
  enum class State { kAbsent, kReport, kClock, kWaiting, kPeers, kDone } state = State::kAbsent;
  HostReport report;
  json addresses;  // by which the others may reach it
  int clock_rounds = 0;
  double asked = 0;  // the clock here, when the host was asked for its own
};

class Survey {
 public:
  Survey(const SurveyOptions& options, BackChannel& channel)
      : options_(options), channel_(channel), mpirun_(find_mpirun()), lines_(options.hosts.hosts.size()) {
    const double limit = number_from_environment("ANNULUS_BOOTSTRAP_TIMEOUT",
                                                 static_cast<double>(options.timeout.count()), 0.001, 86400);
    limit_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
    deadline_ = Clock::now() + limit_;
    limit_text_ = exact(limit) + " s";
    refuse_loopback();
  }
  ~Survey() {
    for (Line& line : lines_) {
      if (line.fd >= 0) close(line.fd);
    }
  }
  Survey(const Survey&) = delete;
  Survey& operator=(const Survey&) = delete;

  std::vector<HostReport> run() {
    forget_default_hosts();
    setenv("ANNULUS_BACK", channel_.address().c_str(), 1);
    std::vector<size_t> all(lines_.size());
    std::iota(all.begin(), all.end(), size_t{0});
    child_ = Child(command(all, {own_program(), "host"}));
    bool running = true;
    while (!stopped_ && !all_are(Line::State::kDone)) {
      if ((!running && !any_open()) || Clock::now() >= deadline_) refuse_absent();
      if (stopped_) break;
      wait_for_events(running);
      running = child_.read_output();
      for (BackChannel::Caller& caller : channel_.accept()) take(caller);
      for (Line& line : lines_) read(line);
      // Where the others listen is known once all have said it.
      if (all_are(Line::State::kWaiting)) send_peers();
    }
    if (stopped_) return {};
    for (Line& line : lines_) say(line, "done\n");
    std::vector<HostReport> reports;
    for (Line& line : lines_) reports.push_back(std::move(line.report));
    // Its end is not waited for: all has been said.
    while (child_.read_output() && wait_for(child_.output(), POLLIN, Clock::now() + std::chrono::seconds(5))) {
    }
    return reports;
  }

 private:
  void refuse_loopback() const {
    if (options_.interfaces.empty()) return;
    const auto is_loopback = [](const std::string& name) {
      for (const NetInterface& interface : network_interfaces()) {
        if (interface.name == name) return interface.loopback;
      }
      return false;
    };
    const auto elsewhere = std::find_if_not(options_.hosts.hosts.begin(), options_.hosts.hosts.end(),
                                            [](const HostSlots& host) { return is_this_host(host.name); });
    if (elsewhere != options_.hosts.hosts.end() &&
        std::all_of(options_.interfaces.begin(), options_.interfaces.end(), is_loopback)) {
      throw Error(ErrorKind::kUsage, "launcher",
                  "interface " + join(options_.interfaces, ",") + " is the loopback, by which host " + elsewhere->name +
                      " is not reached; name one of the network between the hosts");
    }
  }

  std::vector<std::string> command(const std::vector<size_t>& hosts, std::vector<std::string> program) const {
    MpirunRequest request;
    request.ranks = static_cast<int>(hosts.size());
    request.oversubscribe = true;
    request.as_root = geteuid() == 0;
    for (const size_t host : hosts) request.hosts.emplace_back(options_.hosts.hosts[host].name, 1);
    request.interfaces = options_.interfaces;
    request.session_dir = folder_.path();
    request.forward = forwarded_variables();
    request.extra = options_.mpi_args;
    request.program = std::move(program);
    return mpirun_command(mpirun_, request);
  }

  bool all_are(Line::State state) const {
    return std::all_of(lines_.begin(), lines_.end(), [&](const Line& line) { return line.state == state; });
  }

  bool any_open() const {
    return std::any_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.fd >= 0; });
  }

  void wait_for_events(bool running) {
    std::vector<pollfd> fds = {{channel_.fd(), POLLIN, 0}};
    for (const int fd : channel_.pending()) fds.push_back({fd, POLLIN, 0});
    for (const Line& line : lines_) {
      if (line.fd >= 0) fds.push_back({line.fd, POLLIN, 0});
    }
    if (running) fds.push_back({child_.output(), POLLIN, 0});
    if (options_.stop_fd >= 0) fds.push_back({options_.stop_fd, POLLIN, 0});
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()).count();
    poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60000)));
    if (options_.stop_fd >= 0 && (fds.back().revents & POLLIN) != 0 && options_.stop()) stopped_ = true;
  }

  bool asked_to_stop() {
    if (options_.stop_fd < 0) return false;
    if (wait_for(options_.stop_fd, POLLIN, Clock::now()) && options_.stop()) stopped_ = true;
    return stopped_;
  }

  void say(Line& line, const std::string& text) {
    if (line.fd >= 0 && !write_all(line.fd, text, deadline_)) close(std::exchange(line.fd, -1));
  }

  void take(const BackChannel::Caller& caller) {
    const auto number = static_cast<size_t>(caller.number);
    if (caller.kind != "survey" || number >= lines_.size() || lines_[number].state != Line::State::kAbsent) {
      close(caller.fd);
      return;
    }
    Line& line = lines_[number];
    line.fd = caller.fd;
    line.state = Line::State::kReport;
    say(line, survey_line({{"interfaces", options_.interfaces},
                           {"files", options_.facts.files},
                           {"devices", options_.facts.devices}}) +
                  "\n");
  }

  void read(Line& line) {
    while (line.fd >= 0) {
      const LineState state = read_line(line.fd, line.text, kLongestSurveyLine);
      if (state == LineState::kWaiting) return;
      if (state == LineState::kClosed) {
        close(std::exchange(line.fd, -1));
        if (line.state != Line::State::kDone) line.state = Line::State::kAbsent;
        return;
      }
      take_line(line, std::exchange(line.text, ""));
    }
  }

  void take_line(Line& line, const std::string& text) {
    const auto host = static_cast<size_t>(&line - lines_.data());
    const std::string& name = options_.hosts.hosts[host].name;
    const std::string source = "the report of host " + name;
    if (line.state == Line::State::kClock) {
      const double now = utc_now();
      const double accuracy = (now - line.asked) / 2;
      if (line.clock_rounds == 1 || accuracy < line.report.clock_accuracy) {
        line.report.clock_accuracy = accuracy;
        line.report.clock_offset = std::strtod(text.c_str(), nullptr) - (line.asked + now) / 2;
      }
      return ask_clock(line);
    }
    const json said = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!said.is_object()) throw Error(ErrorKind::kInput, "launcher", source + " is no JSON object");
    if (said.contains("error")) {
      const Error error =
          Error::from_wire(said.value("error", "")).value_or(Error(ErrorKind::kInternal, "launcher", text));
      throw Error(error.kind(), error.room(), "host " + name + ": " + std::string(error.message()));
    }
    if (line.state == Line::State::kReport) {
      line.report = report_from_json(said.value("report", json::object()), source);
      line.report.listed = name;
      line.addresses = said.value("addresses", json::array());
      ask_clock(line);
    } else if (line.state == Line::State::kPeers) {
      for (const json& one : said.value("unreachable", json::array())) {
        if (one.is_string()) line.report.unreachable.push_back(one.get<std::string>());
      }
      line.state = Line::State::kDone;
    }
  }

  void ask_clock(Line& line) {
    line.state = line.clock_rounds < kClockRounds ? Line::State::kClock : Line::State::kWaiting;
    if (line.state == Line::State::kWaiting) return;
    ++line.clock_rounds;
    line.asked = utc_now();
    say(line, "clock\n");
  }

  void send_peers() {
    json peers = json::array();
    for (size_t i = 0; i < lines_.size(); ++i) {
      peers.push_back({{"name", options_.hosts.hosts[i].name}, {"addresses", lines_[i].addresses}});
    }
    const std::string text = survey_line({{"peers", peers}}) + "\n";
    for (Line& line : lines_) {
      line.state = Line::State::kPeers;
      say(line, text);
    }
  }

  // Some host has not come, or left. mpirun starts nothing at all where one host fails, and does not always name it:
  // each host that has not come is started alone.
  // Returns where the user wants to stop meanwhile.
  void refuse_absent() {
    const bool in_time = Clock::now() < deadline_;
    child_.end();
    std::vector<size_t> absent;
    // Late are those that hold up the others, which wait for what all have said.
    const auto take = [&](std::initializer_list<Line::State> states) {
      for (size_t i = 0; i < lines_.size(); ++i) {
        if (std::find(states.begin(), states.end(), lines_[i].state) != states.end()) absent.push_back(i);
      }
    };
    take({Line::State::kAbsent});
    if (!in_time) take({Line::State::kReport, Line::State::kClock});
    if (absent.empty()) take({Line::State::kPeers});
    std::vector<std::string> said(lines_.size());
    const Clock::time_point end = Clock::now() + std::min<Clock::duration>(kTryTime, limit_);
    for (size_t at = 0; at < absent.size(); at += kMostTried) {
      if (stopped_ || Clock::now() >= end) break;
      try_alone(end,
                {absent.begin() + static_cast<std::ptrdiff_t>(at),
                 absent.begin() + static_cast<std::ptrdiff_t>(std::min(absent.size(), at + kMostTried))},
                said);
    }
    if (stopped_) return;
    std::vector<std::string> names, faults;
    for (const size_t host : absent) {
      const std::string& name = options_.hosts.hosts[host].name;
      names.push_back(name);
      if (!said[host].empty()) faults.push_back("host " + name + ": " + said[host]);
    }
    const std::string own = words_of_mpirun(child_.text());
    const std::string network =
        " A firewall between the hosts, or interfaces that do not reach the others, are common causes: `--interfaces` "
        "names those that do";
    if (!faults.empty()) {
      throw Error(ErrorKind::kUnavailable, "launcher",
                  "this program cannot be started on " + counted(static_cast<int64_t>(faults.size()), "host") + " of " +
                      options_.hosts.source + ": " + join(faults, "; ") +
                      ". Each host must let this user in without a password (`ssh HOST true`), and have Open MPI and "
                      "this program, " +
                      own_program() + ", at the same places as here." + (unanswered_ ? network : ""));
    }
    throw Error(ErrorKind::kUnavailable, "launcher",
                (names.size() == 1 ? "host " : "hosts ") + join(names, ", ") + " of " + options_.hosts.source +
                    " did not report" + (in_time ? "" : " within " + limit_text_) +
                    "; mpirun said: " + (own.empty() ? "nothing" : own) + "." + network);
  }

  // Fills said[host] for those of `hosts` on which this program does not start.
  void try_alone(Clock::time_point end, const std::vector<size_t>& hosts, std::vector<std::string>& said) {
    std::vector<Child> children;
    for (const size_t host : hosts) children.emplace_back(command({host}, {own_program(), "version"}));
    for (size_t i = 0; i < children.size(); ++i) {
      bool running = true;
      while ((running = children[i].read_output()) && Clock::now() < end && !asked_to_stop()) {
        wait_for(children[i].output(), POLLIN, std::min(end, Clock::now() + kLookTime));
      }
      if (stopped_) return;
      const int code = children[i].end();
      const std::string words = words_of_mpirun(children[i].text());
      if (running) {
        said[hosts[i]] = "mpirun's daemon there does not answer" + (words.empty() ? "" : " (" + words + ")");
        unanswered_ = true;
      } else if (code != 0) {
        said[hosts[i]] = words.empty() ? "mpirun ended with exit code " + std::to_string(code) : words;
      }
    }
  }

  const SurveyOptions& options_;
  BackChannel& channel_;
  const Mpirun mpirun_;
  const Folder folder_;
  std::vector<Line> lines_;
  Child child_;
  Clock::duration limit_;
  Clock::time_point deadline_;
  bool unanswered_ = false;  // a host was tried alone and was silent
  std::string limit_text_;
  bool stopped_ = false;
};

}  // namespace

std::vector<HostReport> survey(const SurveyOptions& options, BackChannel& channel) {
  return Survey(options, channel).run();
}

}  // namespace annulus
