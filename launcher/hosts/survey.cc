// The launcher's side of a survey. See survey.h; survey_answer.cc has the hosts' side.
#include "launcher/hosts/survey.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include "common/checked_json.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/session_dir.h"
#include "launcher/hosts/sockets.h"
#include "launcher/hosts/survey_words.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr int kClockRounds = 8;
constexpr size_t kKeptText = 20000;           // bytes of mpirun's output that are kept
constexpr size_t kMostTried = 16;             // silent hosts that are tried at the same time, each alone
constexpr std::chrono::seconds kTryTime{30};  // the time for trying all of them
constexpr std::chrono::seconds kEndTime{3};   // how long mpirun may take to end on request
constexpr std::chrono::seconds kRestTime{5};  // how long it may take to end by itself after all hosts have reported

std::string own_program() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) throw Error(ErrorKind::kResource, "launcher", "cannot read /proc/self/exe: " + error.message());
  return self.string();
}

// poll() with a deadline.
int poll_until(std::vector<pollfd>& fds, Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left + 1, 0, 60000)));
}

// A running mpirun and its output. The destructor ends it.
class Child {
 public:
  Child() = default;
  explicit Child(const std::vector<std::string>& command) {
    // It starts with no signals blocked, even if the caller has blocked its own to read them from a descriptor.
    sigset_t none;
    sigemptyset(&none);
    process_ = start_mpirun(command, none);
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, process_.pid, 0));
    running_ = true;
  }
  Child(Child&& other) noexcept { *this = std::move(other); }
  Child& operator=(Child&& other) noexcept {
    std::swap(process_, other.process_);
    std::swap(pidfd_, other.pidfd_);
    std::swap(running_, other.running_);
    std::swap(text_, other.text_);
    return *this;
  }
  ~Child() { end(Clock::now() + kEndTime); }

  const std::string& text() const { return text_; }

  // Adds the descriptors to poll, which become readable when mpirun prints something or ends.
  void watch(std::vector<pollfd>& fds) const {
    for (const int fd : {process_.output, pidfd_}) {
      if (fd >= 0) fds.push_back({fd, POLLIN, 0});
    }
  }

  // Reads the available output. Returns false once mpirun has ended. The end of the process is what counts, not the
  // end of its output, which another process may hold open for long, such as an ssh master connection. Only on a kernel
  // without pidfd is the end of the output taken instead.
  bool read_output() {
    if (!running_) return false;
    pollfd ended{pidfd_, POLLIN, 0};
    const bool has_ended = poll(&ended, 1, 0) == 1;
    take();
    running_ = pidfd_ >= 0 ? !has_ended : process_.output >= 0;
    if (!running_) close_all();
    return running_;
  }

  void ask_to_end() const {
    if (running_) kill(process_.pid, SIGTERM);
  }

  // Asks it to end, kills it if it still runs at `deadline`, and returns its exit code.
  int end(Clock::time_point deadline) {
    if (process_.pid <= 0) return -1;
    ask_to_end();
    while (read_output() && Clock::now() < deadline) {
      std::vector<pollfd> fds;
      watch(fds);
      poll_until(fds, deadline);
    }
    if (running_) kill(-process_.pid, SIGKILL);
    close_all();
    int status = 0;
    while (waitpid(process_.pid, &status, 0) < 0 && errno == EINTR) {
    }
    process_ = {};
    running_ = false;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  void take() {
    std::array<char, 4096> buffer;
    while (process_.output >= 0) {
      const ssize_t n = read(process_.output, buffer.data(), buffer.size());
      if (n > 0) {
        text_.append(buffer.data(), std::min(static_cast<size_t>(n), kKeptText - std::min(kKeptText, text_.size())));
      } else if (n < 0 && errno == EINTR) {
      } else if (n < 0 && errno == EAGAIN) {
        return;
      } else {
        close(std::exchange(process_.output, -1));
      }
    }
  }

  void close_all() {
    for (int* const fd : {&process_.output, &pidfd_}) {
      if (*fd >= 0) close(std::exchange(*fd, -1));
    }
  }

  MpirunProcess process_;
  int pidfd_ = -1;
  bool running_ = false;
  std::string text_;
};

// The connection to one host.
struct Line {
  int fd = -1;
  std::string text;
  enum class State { kAbsent, kReport, kClock, kWaiting, kPeers, kDone } state = State::kAbsent;
  HostReport report;
  std::vector<std::string> addresses;  // at which other hosts may reach it (BackChannel::address)
  int clock_rounds = 0;
  double asked = 0;  // the time here when the host was asked for its time
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
      wait(events(), deadline_);
      running = child_.read_output();
      for (BackChannel::Caller& caller : channel_.accept()) take(caller);
      for (Line& line : lines_) read(line);
      // The addresses of all hosts are known once all have reported.
      if (all_are(Line::State::kWaiting)) send_peers();
    }
    if (stopped_) return {};
    for (Line& line : lines_) say(line, "done\n");
    std::vector<HostReport> reports;
    for (Line& line : lines_) reports.push_back(std::move(line.report));
    // mpirun ends by itself after its processes. If it does not, the destructor of child_ ends it.
    const Clock::time_point end = Clock::now() + kRestTime;
    while (!stopped_ && child_.read_output() && Clock::now() < end) {
      std::vector<pollfd> fds;
      child_.watch(fds);
      wait(std::move(fds), end);
    }
    return stopped_ ? std::vector<HostReport>() : reports;
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
                  "interface " + join(options_.interfaces, ",") + " is the loopback, which does not reach host " +
                      elsewhere->name + "; name an interface of the network between the hosts");
    }
  }

  std::vector<std::string> command(const std::vector<size_t>& hosts, std::vector<std::string> program) const {
    MpirunRequest request;
    request.ranks = static_cast<int>(hosts.size());
    request.oversubscribe = true;
    request.as_root = geteuid() == 0;
    for (const size_t host : hosts) request.hosts.emplace_back(options_.hosts.hosts[host].name, 1);
    if (need_hostfile(request.hosts)) {
      request.hostfile = folder_.path() + "/hosts";
      write_hostfile(request.hostfile, request.hosts);
    }
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

  std::vector<pollfd> events() const {
    std::vector<pollfd> fds = {{channel_.fd(), POLLIN, 0}};
    for (const int fd : channel_.pending()) fds.push_back({fd, POLLIN, 0});
    for (const Line& line : lines_) {
      if (line.fd >= 0) fds.push_back({line.fd, POLLIN, 0});
    }
    child_.watch(fds);
    return fds;
  }

  // Waits until a descriptor is ready, `deadline` has come, or the user wants to stop.
  void wait(std::vector<pollfd> fds, Clock::time_point deadline) {
    if (options_.stop_fd >= 0) fds.push_back({options_.stop_fd, POLLIN, 0});
    const bool ready = poll_until(fds, deadline) > 0;
    if (ready && options_.stop_fd >= 0 && (fds.back().revents & POLLIN) != 0 && options_.stop()) stopped_ = true;
  }

  void say(Line& line, const std::string& text) {
    if (line.fd >= 0 && !write_all(line.fd, text, deadline_)) leave(line);
  }

  // Closes the connection to a host that has gone.
  static void leave(Line& line) {
    close(std::exchange(line.fd, -1));
    if (line.state != Line::State::kDone) line.state = Line::State::kAbsent;
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
      if (state == LineState::kClosed) return leave(line);
      take_line(line, std::exchange(line.text, ""));
    }
  }

  void take_line(Line& line, const std::string& text) {
    const auto host = static_cast<size_t>(&line - lines_.data());
    const std::string& name = options_.hosts.hosts[host].name;
    const std::string source = "the report of host " + name;
    const double now = utc_now();
    const json value = parse_checked_json(text, "launcher", source);
    const CheckedJson said(value, "launcher", source);
    if (line.state == Line::State::kClock) {
      const double accuracy = (now - line.asked) / 2;
      const double clock = said.number(0, 1e12);
      if (line.clock_rounds == 1 || accuracy < line.report.clock_accuracy) {
        line.report.clock_accuracy = accuracy;
        line.report.clock_offset = clock - (line.asked + now) / 2;
      }
      return ask_clock(line);
    }
    if (said.has("error")) {
      const std::string wire = said.at("error").text(kLongestSurveyLine);
      const Error error = Error::from_wire(wire).value_or(Error(ErrorKind::kInternal, "launcher", wire));
      throw Error(error.kind(), error.room(), "host " + name + ": " + std::string(error.message()));
    }
    if (line.state == Line::State::kReport) {
      line.report = report_from_json(value.value("report", json::object()), source);
      line.report.listed = name;
      if (said.has("addresses")) line.addresses = texts_in(said.at("addresses"));
      ask_clock(line);
    } else if (line.state == Line::State::kPeers) {
      if (said.has("unreachable")) line.report.unreachable = texts_in(said.at("unreachable"));
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

  // Throws an error that names the hosts that are missing and why. If one host fails, mpirun starts nothing on any and
  // does not always name that host, so each missing host is tried alone. Returns only if the user wants to stop.
  void refuse_absent() {
    const bool in_time = Clock::now() < deadline_;
    child_.end(Clock::now() + kEndTime);
    std::vector<size_t> absent;
    // The absent hosts are those on which the others wait, because the addresses are sent only after all have reported.
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
                      ". Each host must let this user log in without a password (`ssh HOST true`), and have Open MPI "
                      "and this program, " +
                      own_program() + ", at the same paths as here." + (unanswered_ ? network : ""));
    }
    throw Error(ErrorKind::kUnavailable, "launcher",
                (names.size() == 1 ? "host " : "hosts ") + join(names, ", ") + " of " + options_.hosts.source +
                    " did not report" + (in_time ? "" : " within " + limit_text_) +
                    "; mpirun said: " + (own.empty() ? "nothing" : own) + "." + network);
  }

  // Starts `annulus version` on each of `hosts` alone, and sets said[host] for those on which it fails.
  void try_alone(Clock::time_point end, const std::vector<size_t>& hosts, std::vector<std::string>& said) {
    std::vector<Child> children;
    for (const size_t host : hosts) children.emplace_back(command({host}, {own_program(), "version"}));
    std::vector<bool> running(children.size(), true);
    const auto look = [&] {
      for (size_t i = 0; i < children.size(); ++i) running[i] = children[i].read_output();
      return std::find(running.begin(), running.end(), true) != running.end();
    };
    while (look() && Clock::now() < end && !stopped_) {
      std::vector<pollfd> fds;
      for (const Child& child : children) child.watch(fds);
      wait(std::move(fds), end);
    }
    // All are asked before any is waited for, so that they end at the same time.
    for (const Child& child : children) child.ask_to_end();
    const Clock::time_point last = Clock::now() + kEndTime;
    for (size_t i = 0; i < children.size(); ++i) {
      const int code = children[i].end(last);
      const std::string words = words_of_mpirun(children[i].text());
      if (running[i]) {
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
  const SessionDir folder_;
  std::vector<Line> lines_;
  Child child_;
  Clock::duration limit_;
  Clock::time_point deadline_;
  bool unanswered_ = false;  // whether a host that was tried alone did not answer
  std::string limit_text_;
  bool stopped_ = false;
};

}  // namespace

std::vector<HostReport> survey(const SurveyOptions& options, BackChannel& channel) {
  return Survey(options, channel).run();
}

}  // namespace annulus
