// The log's backend, which uses spdlog and writes to the console and to a file of bounded size. Programs install it
// (launcher/program.cc). A shared library that other programs load has no backend, and so does not need spdlog.
#pragma once

namespace annulus {

// Makes it the backend of the log (log_setup.h). Thread safe.
void install_logger();

}  // namespace annulus
