// A ring attention of one's own: the code under test of attention_test.cc, which holds it against the definition for
// drawn patterns.
#pragma once

#include <ATen/core/Tensor.h>

#include "annulus/testing/oracle.h"     // Count
#include "annulus/testing/run_ranks.h"  // Communicator

// Returns out [B, n, H, D] of this rank's queries. q [B, n, H, D], k and v [B, m, Hk, D], fp64: this rank's rows, n and
// m of them on each rank, one rank after the other. count: how often a pair of the whole sequence is counted. A query
// without keys gives 0. Collective.
//
// RING_BUG="no key" merges the blocks of a query that has seen no key yet as if it had.
at::Tensor ring_attention(annulus::Communicator& comm, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, const annulus::Count& count);
