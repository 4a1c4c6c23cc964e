// Host discovery starts this program once on every host of a job through mpirun, as the ranks will be started. Each
// process reports its host (host_report.h) to the launcher (launcher_socket.h), has its clock compared with the
// launcher's, and reports which other hosts it cannot reach. Used by `launch`, `topology --hosts` and `doctor --hosts`
// before any rank starts.
//
// The launcher sends {"interfaces", "files", "devices"}, {"clock"} several times, the addresses of all hosts,
// {"peers"}, and {"done"}. The host answers with {"report", "addresses"}, its time, {"clock"}, what it could not reach,
// {"unreachable"}, or {"error"}.
//
// Thread safety: one discovery at a time, because it changes the environment.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/hosts/host_facts.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/hosts/mpirun.h"

namespace annulus {

struct DiscoveryOptions {
  HostList hosts;
  std::vector<std::string> interfaces = {};  // --interfaces
  std::vector<std::string> mpi_args = {};
  FactsRequest facts = {};
  // The time in which all hosts must report. ANNULUS_BOOTSTRAP_TIMEOUT has precedence if it is set.
  std::chrono::seconds timeout{60};
  // For a caller that reads its signals from a descriptor: when stop_fd is readable, `stop` is called, and if it
  // returns true, the discovery ends and returns nothing. Without stop_fd, a signal ends the process.
  int stop_fd = -1;
  std::function<bool()> stop = nullptr;
};

// Returns the reports in the order of the list. Throws Error(kUnavailable), which names the hosts that did not report,
// what mpirun printed about them (unreachable, no such program there, ...) and what to do, and Error(kUsage) if the
// only interfaces are loopbacks and there are other hosts. An error on a host is thrown here with the host's name.
std::vector<HostReport> discover_hosts(const DiscoveryOptions& options, LauncherSocket& socket);

// What the launcher asks of a host: a report, the time, whether it reaches the others, or nothing more.
struct HostQuestion {
  struct Peer {
    std::string name;
    std::vector<std::string> addresses;  // LauncherSocket::address
  };
  enum class Kind { kReport, kClock, kPeers, kDone };
  Kind kind = Kind::kReport;
  FactsRequest facts = {};                   // of kReport
  std::vector<std::string> interfaces = {};  // of kReport
  std::vector<Peer> peers = {};              // of kPeers, the host itself among them
};

// Reads a question, a line. Throws Error(kInput) if it is none.
HostQuestion host_question_of(std::string_view line);

// The work of the subcommand `host` on each host: reports, answers the launcher, and tries to reach the other hosts.
// Returns the exit code.
int run_discovery_agent();

}  // namespace annulus
