// See start_job.h.
#include "launcher/start_job.h"

#include <cstdio>

#include "common/version.h"

namespace annulus {

Job start_job(std::vector<Field> fields, const std::string& device) {
  BootstrapOptions options;
  options.fingerprint = std::move(fields);
  options.fingerprint.insert(options.fingerprint.begin(), {"version", kVersion});
  options.device = device;
  options.host_by_host = true;
  options.start = "annulus launch -n";
  options.report = [](const std::string& message) { std::fprintf(stderr, "annulus: %s\n", message.c_str()); };
  return bootstrap(options);
}

}  // namespace annulus
