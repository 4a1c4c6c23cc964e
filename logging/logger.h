// The logger of a program, made of spdlog: its sinks are the terminal and a bounded file. Programs install it; a shared
// library that others load does without, and without spdlog.
#pragma once

namespace annulus {

// From now on records (log.h) pass through it.
void install_logger();

}  // namespace annulus
