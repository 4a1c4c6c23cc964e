// See start_job.h.
#include "launcher/subcommands/start_job.h"

#include "common/logging/log_setup.h"
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
  if (job.rank != job.launch.rank) report_number(job.rank);
  return job;
}

}  // namespace annulus
