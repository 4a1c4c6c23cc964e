// Doing something on every rank that may fail on some: all go on, or all fail with one error that names every rank that
// failed and what each of them said. Used wherever ranks must not part ways: bootstrap, devices, files, plans.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"

namespace annulus {

// Runs `action` on every rank (with `only_first`: on rank 0). When it raises anywhere, every rank raises an Error of
// the kind and room of the lowest failing rank. Its message names the failing ranks, in groups of those that said the
// same, but for a rank that failed alone, which raises its own error, and for what all ranks (or rank 0 for all) say
// alike. Collective.
void together(Communicator& comm, OpLabel label, const std::function<void()>& action, bool only_first = false);

// As together, but the error is returned instead of raised, and is the same text on every rank.
std::optional<Error> failure_of_any(Communicator& comm, OpLabel label, const std::function<void()>& action,
                                    bool only_first = false);

// The text that rank 0 has made. Fails as `together` does. Collective.
std::string from_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make);

// To be called in a catch block: what is being handled, as an Error. An Error is itself; running out of memory is
// kResource, anything else kInternal, and both say what was being done ("" where that goes without saying). LibTorch's
// messages lose the stack that they end with.
Error error_in_flight(std::string_view doing);

}  // namespace annulus
