// The example's problem: a sequence dealt over the ranks, attention over it forward and backward, and the same computed
// densely on one rank. Used by attention.cc and attention_threads_test.cc.
#pragma once

#include <cstdint>

#include "comm/communicator.h"

// Causal attention over all ranks of comm. Returns the largest difference, over all ranks, of the output and of the
// gradients of q, k and v from the dense computation. Collective.
double largest_error(annulus::Communicator& comm, int64_t length);
