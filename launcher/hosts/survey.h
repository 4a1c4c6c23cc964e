// A survey: this program started once on every host of a job through mpirun, as the ranks will be, to report what the
// host is (host_report.h) through the back channel, to say which of the others it reaches, and to have its clock
// compared. Used by `launch`, `topology --hosts` and `doctor --hosts` before any rank starts.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "launcher/hosts/back_channel.h"
#include "launcher/hosts/host_facts.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/mpirun.h"

namespace annulus {

struct SurveyOptions {
  HostList hosts;
  std::vector<std::string> interfaces;  // --interfaces
  std::vector<std::string> mpi_args;
  FactsRequest facts;
  std::chrono::seconds timeout{60};  // until all have reported
  int stop_fd = -1;                  // ends it when it can be read (signals): survey() then returns nothing
};

// In the order of the list. Error(kUnavailable) names the hosts that did not report, with what mpirun said of them
// (unreachable, no such program there, ...) and what to do; Error(kUsage) as BackChannel's.
std::vector<HostReport> survey(const SurveyOptions& options, BackChannel& channel);

// What the verb `host` does on each of them: reports, answers the launcher, tries the others. The exit code.
int answer_survey();

}  // namespace annulus
