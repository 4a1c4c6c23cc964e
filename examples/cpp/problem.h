// The problem of the example: attention over a sequence that is divided over the ranks, forward and backward, and the
// same computed densely on each rank. Used by attention.cc and attention_threads_test.cc.
#pragma once

#include <cstdint>

#include "comm/communicator.h"

// Computes causal attention over `length` positions on all ranks of comm. Returns the largest absolute difference, over
// all ranks, of the output and of the gradients of q, k and v from the dense computation. Collective.
double largest_error(annulus::Communicator& comm, int64_t length);
