// An all-reduce of one's own over annulus's communicator: the code under test of this example. Blocks travel around the
// ring in both directions at once, so that it takes half as many steps.
//
// The variable RING_BUG plants a mistake in it; each is found by another tool (README.md).
#pragma once

#include <ATen/core/Tensor.h>

#include "annulus/testing/ranks_test.h"  // Communicator

// Adds up x [n], fp64, over all ranks, in place. All ranks get the same bits. Raises std::runtime_error if a message is
// not the expected one. Collective.
void ring_all_reduce(annulus::Communicator& comm, at::Tensor& x);
