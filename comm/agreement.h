// Doing something on every rank that may fail on some: all go on, or all fail with one error that names every rank that
// failed and what each of them said. And comparing what all ranks must mean alike. Used wherever ranks must not part
// ways: bootstrap, devices, files, plans, calls of attention.
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

// What all ranks say alike.
struct Field {
  std::string name;
  std::string value;
};

// Raises Error(kMismatch) on every rank, naming which ranks differ in which field, when the values of a field are not
// the same on all ranks. One small collective when they are.
void require_agreement(Communicator& comm, const std::vector<Field>& fields, OpLabel label);

// What a rank brings to a call that all ranks are about to make.
struct Terms {
  std::vector<Field> alike;  // must be the same on every rank
  using Numbers = std::array<int64_t, 3>;
  Numbers numbers{};  // its own; what they mean is for the caller to say
};

// Before every call of attention: runs `find` on every rank, and returns the numbers of all ranks in rank order. Where
// `find` raises on any, all raise what failure_of_any returns; where the terms are not alike, what require_agreement
// raises. One collective of 48 bytes a rank when all is well; on one rank none, and what `find` raises passes
// unchanged.
std::vector<Terms::Numbers> agree_together(Communicator& comm, OpLabel label, const std::function<Terms()>& find);

// To be called in a catch block: what is being handled, as an Error. An Error is itself; running out of memory is
// kResource, anything else kInternal, and both say what was being done ("" where that goes without saying). LibTorch's
// messages lose the stack that they end with.
Error error_in_flight(std::string_view doing);

}  // namespace annulus
