// The log's backend, which uses spdlog and writes to the console and to a file of bounded size. Programs install it
// (launcher/program.cc). The shared library for Python does not, and so does not need spdlog.
#pragma once

namespace annulus {

// Installs it by set_log_backend() (log_setup.h). Thread safe.
void install_logger();

}  // namespace annulus
