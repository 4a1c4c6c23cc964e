// The launcher's side of host discovery. See host_discovery.h; host_discovery_agent.cc has the hosts' side.
#include "launcher/hosts/host_discovery.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "common/checked_json.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/mpirun_process.h"
#include "launcher/hosts/session_dir.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr int kClockRounds = 8;
constexpr size_t kMostTried = 16;             // silent hosts that are tried at the same time, each alone
constexpr std::chrono::seconds kTryTime{30};  // the time for trying all of them
constexpr std::chrono::seconds kRestTime{5};  // how long it may take to end by itself after all hosts have reported

// mpirun starts with no signals blocked, even if the caller has blocked its own to read them from a descriptor.
MpirunProcess start(const std::vector<std::string>& command) {
  sigset_t none;
  sigemptyset(&none);
  return {command, none};
}

// Whether mpirun runs; reads what it has printed.
bool runs(MpirunProcess& mpirun) {
  const bool running = mpirun.running();
  mpirun.read();
  return running;
}

// The connection to one host.
struct HostConnection {
  int fd = -1;
  std::string text;
  enum class State { kAbsent, kReport, kClock, kWaiting, kPeers, kDone } state = State::kAbsent;
  HostReport report;
  std::vector<std::string> addresses;  // at which other hosts may reach it (LauncherSocket::address)
  int clock_rounds = 0;
  double asked = 0;  // the time here when the host was asked for its time
};

class Discovery {
 public:
  Discovery(const DiscoveryOptions& options, LauncherSocket& socket)
      : options_(options), socket_(socket), installed_(find_mpirun()), hosts_(options.hosts.hosts.size()) {
    const double limit = number_from_environment("ANNULUS_BOOTSTRAP_TIMEOUT",
                                                 static_cast<double>(options.timeout.count()), 0.001, 86400);
    limit_ = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
    deadline_ = Clock::now() + limit_;
    limit_text_ = exact(limit) + " s";
    refuse_loopback();
  }
  ~Discovery() {
    for (HostConnection& host : hosts_) {
      if (host.fd >= 0) close(host.fd);
    }
  }
  Discovery(const Discovery&) = delete;
  Discovery& operator=(const Discovery&) = delete;

  std::vector<HostReport> run() {
    forget_default_hosts();
    setenv("ANNULUS_LAUNCHER", socket_.address().c_str(), 1);
    std::vector<size_t> all(hosts_.size());
    std::iota(all.begin(), all.end(), size_t{0});
    mpirun_ = start(command(all, {own_program(), "host"}));
    bool running = true;
    while (!stopped_ && !all_are(HostConnection::State::kDone)) {
      if ((!running && !any_open()) || Clock::now() >= deadline_) refuse_absent();
      if (stopped_) break;
      wait(events(), *earlier(deadline_, socket_.deadline()));
      running = runs(mpirun_);
      for (const LauncherSocket::Connection& connection : socket_.accept()) take(connection);
      for (HostConnection& host : hosts_) read(host);
      // The addresses of all hosts are known once all have reported.
      if (all_are(HostConnection::State::kWaiting)) send_peers();
    }
    if (stopped_) return {};
    for (HostConnection& host : hosts_) send(host, {{"done", true}});
    std::vector<HostReport> reports;
    for (HostConnection& host : hosts_) reports.push_back(std::move(host.report));
    // mpirun ends by itself after its processes. If it does not, the destructor of mpirun_ ends it.
    const Clock::time_point end = Clock::now() + kRestTime;
    while (!stopped_ && runs(mpirun_) && Clock::now() < end) {
      std::vector<pollfd> fds;
      mpirun_.watch(fds);
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
    return mpirun_command(installed_, request);
  }

  bool all_are(HostConnection::State state) const {
    return std::all_of(hosts_.begin(), hosts_.end(), [&](const HostConnection& host) { return host.state == state; });
  }

  bool any_open() const {
    return std::any_of(hosts_.begin(), hosts_.end(), [](const HostConnection& host) { return host.fd >= 0; });
  }

  std::vector<pollfd> events() const {
    std::vector<pollfd> fds;
    socket_.watch(fds);
    for (const HostConnection& host : hosts_) {
      if (host.fd >= 0) fds.push_back({host.fd, POLLIN, 0});
    }
    mpirun_.watch(fds);
    return fds;
  }

  // Waits until a descriptor is ready, `deadline` has come, or the user wants to stop.
  void wait(std::vector<pollfd> fds, Clock::time_point deadline) {
    if (options_.stop_fd >= 0) fds.push_back({options_.stop_fd, POLLIN, 0});
    const bool ready = poll_until(fds, deadline) > 0;
    if (ready && options_.stop_fd >= 0 && (fds.back().revents & POLLIN) != 0 && options_.stop()) stopped_ = true;
  }

  void send(HostConnection& host, const json& message) {
    if (host.fd >= 0 && !write_all(host.fd, message_line(message), deadline_)) disconnect(host);
  }

  // Closes the connection to a host that has gone.
  static void disconnect(HostConnection& host) {
    close(std::exchange(host.fd, -1));
    if (host.state != HostConnection::State::kDone) host.state = HostConnection::State::kAbsent;
  }

  void take(const LauncherSocket::Connection& connection) {
    const auto number = static_cast<size_t>(connection.number);
    if (connection.purpose != "host" || number >= hosts_.size() ||
        hosts_[number].state != HostConnection::State::kAbsent) {
      close(connection.fd);
      return;
    }
    HostConnection& host = hosts_[number];
    host.fd = connection.fd;
    host.state = HostConnection::State::kReport;
    send(host,
         {{"interfaces", options_.interfaces}, {"files", options_.facts.files}, {"devices", options_.facts.devices}});
  }

  void read(HostConnection& host) {
    while (host.fd >= 0) {
      const LineState state = read_line(host.fd, host.text);
      if (state == LineState::kWaiting) return;
      if (state == LineState::kClosed) return disconnect(host);
      take_message(host, std::exchange(host.text, ""));
    }
  }

  void take_message(HostConnection& host, const std::string& text) {
    const std::string& name = options_.hosts.hosts[&host - hosts_.data()].name;
    const std::string source = "the report of host " + name;
    const double now = utc_now();
    const json value = message_of(parse_checked_json(text, "launcher", source));
    const CheckedJson said(value, "launcher", source);
    if (said.has("error")) {
      const std::string wire = said.at("error").text(kLongestMessage);
      const Error error = Error::from_wire(wire).value_or(Error(ErrorKind::kInternal, "launcher", wire));
      throw Error(error.kind(), error.module(), "host " + name + ": " + std::string(error.message()));
    }
    if (host.state == HostConnection::State::kClock) {
      const double accuracy = (now - host.asked) / 2;
      const double clock = said.at("clock").number(0, 1e12);
      if (host.clock_rounds == 1 || accuracy < host.report.clock_accuracy) {
        host.report.clock_accuracy = accuracy;
        host.report.clock_offset = clock - (host.asked + now) / 2;
      }
      return ask_clock(host);
    }
    if (host.state == HostConnection::State::kReport) {
      host.report = report_from_json(value.value("report", json::object()), source);
      host.report.listed = name;
      if (said.has("addresses")) host.addresses = said.at("addresses").texts();
      ask_clock(host);
    } else if (host.state == HostConnection::State::kPeers) {
      if (said.has("unreachable")) host.report.unreachable = said.at("unreachable").texts();
      host.state = HostConnection::State::kDone;
    }
  }

  void ask_clock(HostConnection& host) {
    host.state = host.clock_rounds < kClockRounds ? HostConnection::State::kClock : HostConnection::State::kWaiting;
    if (host.state == HostConnection::State::kWaiting) return;
    ++host.clock_rounds;
    host.asked = utc_now();
    send(host, {{"clock", true}});
  }

  void send_peers() {
    json peers = json::array();
    for (size_t i = 0; i < hosts_.size(); ++i) {
      peers.push_back({{"name", options_.hosts.hosts[i].name}, {"addresses", hosts_[i].addresses}});
    }
    for (HostConnection& host : hosts_) {
      host.state = HostConnection::State::kPeers;
      send(host, {{"peers", peers}});
    }
  }

  // Throws an error that names the hosts that are missing and why. If one host fails, mpirun starts nothing on any and
  // does not always name that host, so each missing host is tried alone. Returns only if the user wants to stop.
  void refuse_absent() {
    const bool in_time = Clock::now() < deadline_;
    mpirun_.end(Clock::now() + kMpirunEndTime);
    std::vector<size_t> absent;
    // The absent hosts are those on which the others wait, because the addresses are sent only after all have reported.
    const auto take = [&](std::initializer_list<HostConnection::State> states) {
      for (size_t i = 0; i < hosts_.size(); ++i) {
        if (std::find(states.begin(), states.end(), hosts_[i].state) != states.end()) absent.push_back(i);
      }
    };
    take({HostConnection::State::kAbsent});
    if (!in_time) take({HostConnection::State::kReport, HostConnection::State::kClock});
    if (absent.empty()) take({HostConnection::State::kPeers});
    std::vector<std::string> said(hosts_.size());
    const Clock::time_point end = Clock::now() + std::min<Clock::duration>(kTryTime, limit_);
    for (size_t at = 0; at < absent.size(); at += kMostTried) {
      if (stopped_ || Clock::now() >= end) break;
      try_alone(end, {absent.begin() + at, absent.begin() + (std::min(absent.size(), at + kMostTried))}, said);
    }
    if (stopped_) return;
    std::vector<std::string> names, faults;
    for (const size_t host : absent) {
      const std::string& name = options_.hosts.hosts[host].name;
      names.push_back(name);
      if (!said[host].empty()) faults.push_back("host " + name + ": " + said[host]);
    }
    const std::string own = mpirun_complaint(mpirun_.text());
    const std::string network =
        " A firewall between the hosts, or interfaces that do not reach the others, are common causes: `--interfaces` "
        "names those that do";
    if (!faults.empty()) {
      throw Error(ErrorKind::kUnavailable, "launcher",
                  "this program cannot be started on " + counted(faults.size(), "host") + " of " +
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
    std::vector<MpirunProcess> children;
    for (const size_t host : hosts) children.push_back(start(command({host}, {own_program(), "version"})));
    std::vector<bool> running(children.size(), true);
    const auto look = [&] {
      for (size_t i = 0; i < children.size(); ++i) running[i] = runs(children[i]);
      return std::find(running.begin(), running.end(), true) != running.end();
    };
    while (look() && Clock::now() < end && !stopped_) {
      std::vector<pollfd> fds;
      for (const MpirunProcess& child : children) child.watch(fds);
      wait(std::move(fds), end);
    }
    // All are asked before any is waited for, so that they end at the same time.
    for (MpirunProcess& child : children) child.send(SIGTERM);
    const Clock::time_point last = Clock::now() + kMpirunEndTime;
    for (size_t i = 0; i < children.size(); ++i) {
      const int code = children[i].end(last);
      const std::string words = mpirun_complaint(children[i].text());
      if (running[i]) {
        said[hosts[i]] = "mpirun's daemon there does not answer" + (words.empty() ? "" : " (" + words + ")");
        unanswered_ = true;
      } else if (code != 0) {
        said[hosts[i]] = words.empty() ? "mpirun ended with exit code " + std::to_string(code) : words;
      }
    }
  }

  const DiscoveryOptions& options_;
  LauncherSocket& socket_;
  const Mpirun installed_;
  const SessionDir folder_;
  std::vector<HostConnection> hosts_;
  MpirunProcess mpirun_;
  Clock::duration limit_;
  Clock::time_point deadline_;
  bool unanswered_ = false;  // whether a host that was tried alone did not answer
  std::string limit_text_;
  bool stopped_ = false;
};

}  // namespace

std::vector<HostReport> discover_hosts(const DiscoveryOptions& options, LauncherSocket& socket) {
  return Discovery(options, socket).run();
}

}  // namespace annulus
