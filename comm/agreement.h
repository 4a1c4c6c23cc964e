// Runs on every rank what may fail on some of them: either all ranks continue, or all raise one error that names every
// rank that failed and what each of them reported. Also compares values that must be the same on all ranks. Used where
// ranks must take the same decision: bootstrap, devices, files, plans, calls of attention.
//
// Thread safety: as for the communicator, which one thread uses at a time.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"

namespace annulus {

// Runs `action` on every rank (with `only_first`: on rank 0 alone). If it raises on any rank, every rank raises an
// Error of the kind and package of the lowest failing rank. Its message names the failing ranks, those with the same
// message together: "on ranks 0,2: the disk is full; on rank 3: ...". No ranks are named if all ranks (or rank 0 for
// all) failed with the same message, and a rank that failed alone raises its own error. Ranks that did not fail
// themselves raise a FollowingError (following_error.h). Collective.
void together(Communicator& comm, OpLabel label, const std::function<void()>& action, bool only_first = false);

// Like together(), but returns the error instead of raising it, with the same text on every rank.
std::optional<Error> failure_of_any(Communicator& comm, OpLabel label, const std::function<void()>& action,
                                    bool only_first = false);

// Returns on every rank the text that `make` returns on rank 0. Raises as together() does. Collective.
std::string from_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make);

// A named value that must be the same on all ranks.
struct Field {
  std::string name;
  std::string value;
};

// What ranks compare before the backward of a call: the number that the call had (Communicator::number_call). Without
// it two calls that differ in nothing but their content could be differentiated in another order on one rank, and each
// would get parts of the other's gradients without an error.
Field backward_term(int64_t number);

// Raises Error(kMismatch) on every rank, naming the ranks and the fields that differ, if the value of a field is not
// the same on all ranks. If they all are, this is one small collective.
void require_agreement(Communicator& comm, const std::vector<Field>& fields, OpLabel label);

// What one rank contributes to a call that all ranks are about to make.
struct Terms {
  std::vector<Field> alike;  // must be the same on every rank
  using Numbers = std::array<int64_t, 3>;
  Numbers numbers{};  // this rank's own; the caller defines their meaning
};

// Used before every call of attention: runs `find` on every rank and returns the numbers of all ranks, in rank order.
// If `find` raises on any rank, all ranks raise what failure_of_any() returns; if the fields differ, they raise what
// require_agreement() raises. Without an error this is one collective of 48 bytes per rank. On a single rank there is
// no collective, and what `find` raises passes through unchanged.
std::vector<Terms::Numbers> agree_together(Communicator& comm, OpLabel label, const std::function<Terms()>& find);

// Returns the exception that is being handled as an Error; call it in a catch block. An Error is returned as it is,
// running out of memory becomes kResource, and everything else becomes kInternal. The message of the last two begins
// with `doing`, what was being done, unless that is empty. The stack trace at the end of LibTorch's messages is cut
// off.
Error error_in_flight(std::string_view doing);

}  // namespace annulus
