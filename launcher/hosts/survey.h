// A survey: this program started once on every host of a job through mpirun, as the ranks will be, to report what the
// host is (host_report.h) through the back channel, to say which of the others it reaches, and to have its clock
// compared. Used by `launch`, `topology --hosts` and `doctor --hosts` before any rank starts.
//
// Both sides write lines. The launcher: what to look for (JSON); "clock" several times; where the others listen (JSON);
// "done". The host, in answer: its report (JSON), its clock, whom it could not reach (JSON).
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "launcher/hosts/back_channel.h"
#include "launcher/hosts/host_facts.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/mpirun.h"

namespace annulus {

struct SurveyOptions {
  HostList hosts;
  std::vector<std::string> interfaces = {};  // --interfaces
  std::vector<std::string> mpi_args = {};
  FactsRequest facts = {};
  // Until all have reported; ANNULUS_BOOTSTRAP_TIMEOUT, where it is set, comes first.
  std::chrono::seconds timeout{60};
  // Signals of a caller that takes them from a descriptor: when it can be read, `stop` is called, and where it returns
  // true the survey ends and returns nothing. Without one, a signal ends the process and with it the survey.
  int stop_fd = -1;
  std::function<bool()> stop = nullptr;
};

// In the order of the list. Error(kUnavailable) names the hosts that did not report, with what mpirun said of them
// (unreachable, no such program there, ...) and what to do; Error(kUsage): an interface that no other host is reached
// by.
std::vector<HostReport> survey(const SurveyOptions& options, BackChannel& channel);

// What the verb `host` does on each of them: reports, answers the launcher, tries the others. The exit code.
int answer_survey();

}  // namespace annulus
