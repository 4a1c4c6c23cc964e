// See start_job.h.
#include "launcher/subcommands/start_job.h"

#include "common/logging/log.h"
#include "common/logging/log_setup.h"
#include "common/text.h"
#include "common/trace/recorder.h"
#include "common/version.h"
#include "launcher/launch/rank.h"

namespace annulus {

Job start_job(std::vector<Field> fields, const std::string& device) {
  BootstrapOptions options;
  options.fingerprint = std::move(fields);
  options.fingerprint.insert(options.fingerprint.begin(), {"version", kVersion});
  options.device = device;
  options.host_by_host = true;
  options.start = "annulus launch -n";
  Job job = bootstrap(options);
  set_log_place(job.host, job.rank, job.size);  // the launcher may number the ranks differently
  set_main_trace_thread(job.rank);
  if (job.rank != job.launch.rank) report_number(job.rank);
  return job;
}

void warn_of_default_layout(std::string_view subcommand, const Job& job) {
  if (job.size == 1) return;  // one rank has all positions in every layout
  log_warn_once_per_job(subcommand, "--layout was not given, so " + counted(job.size, "rank") +
                                        " divide the positions zigzag, as in training; it was contiguous in earlier "
                                        "versions. --layout zigzag or --layout contiguous ends this warning");
}

}  // namespace annulus
