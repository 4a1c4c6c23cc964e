// Doing something on every rank that may fail on some: all go on, or all fail with a message that names who failed.
// Used by trainer.cc for files, which one host may lack and another have.
#pragma once

#include <functional>
#include <string>

#include "comm/communicator.h"

namespace annulus {

// Runs `action` on every rank (with `only_first`: on rank 0). When it raises an Error anywhere, every rank raises: its
// own, or the first failing rank's with that rank named. Collective.
void together(Communicator& comm, OpLabel label, const std::function<void()>& action, bool only_first = false);

// The text that rank 0 has made. Fails as `together` does. Collective.
std::string from_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make);

}  // namespace annulus
