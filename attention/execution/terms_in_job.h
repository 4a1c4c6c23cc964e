// The terms of `auto` in a running job (attention/plan/time.h): which of its ranks share a host, and how much memory
// is free on the rank that has the least. Used by the modules, the operators for PyTorch, and attend.
//
// Thread safety: functions that may be called by several threads, each with its own communicator.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// Returns the bytes that this rank can still take: of a GPU what is free on it, of a host's memory (memory/available.h)
// the rank's part, as many as the host has ranks of this communicator or, if more, of the job. 0: not known, or nothing
// depends on it, because the communicator has one rank. Once terms_in_job() has been given a number for a communicator
// it is that number, so that the forward, the backward and later calls choose alike.
int64_t free_bytes(Communicator& comm, c10::Device device);

// Returns the least of the numbers that free_bytes() gives on the ranks and that are known; 0 if none is. Collective.
int64_t least_free_bytes(Communicator& comm, c10::Device device, OpLabel label);

// Returns the terms with the hosts of the communicator's ranks (on_hosts), and with `least` as the memory that
// attention may hold, or the machine's if that is less; 0 stays unknown. Where so little is free that nothing fits, the
// leanest is chosen. Terms by which the leanest is taken keep that.
TermsPointer terms_in_job(const TermsPointer& terms, Communicator& comm, int64_t least);

// The same without communication, for a plan that is made ahead: with what terms_in_job() was given for this
// communicator, if it was.
TermsPointer terms_in_job(const TermsPointer& terms, Communicator& comm);

}  // namespace annulus
