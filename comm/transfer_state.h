// A message or a part of a collective that is under way, and what an error message says about those that are not
// complete. Internal to comm/: used by the backends that carry messages (comm/mpi, comm/c10d, comm/nccl).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus::comm_internal {

// A message to or from a rank of a communicator, or this rank's part of a collective.
struct TransferState {
  int peer = -1;  // a rank of the communicator; -1 for a collective
  bool is_send = false;
  int64_t bytes = 0;
  bool done = false;
};

// "receiving 16 bytes from rank 1"
std::string describe(const Communicator& comm, const TransferState& transfer);
// "200 bytes (message 3 between these ranks, fp32)", for message number 3, counted from 0. `shape` is appended to the
// dtype.
std::string describe_message(int64_t bytes, int64_t number, at::ScalarType dtype, const std::string& shape = "");
// "rank 1 sent SENT, but rank 0 expected EXPECTED", of two such descriptions
std::string describe_mismatch(const Communicator& comm, int peer, const std::string& sent, const std::string& expected);
// "receiving 16 bytes from rank 1: not done (nor 2 more transfers)", "all_reduce: rank 3 did not come". At least one
// transfer must be unfinished. collective: the name of the collective; null for an exchange.
std::string describe_unfinished(const Communicator& comm, const std::vector<TransferState>& transfers,
                                const char* collective);

}  // namespace annulus::comm_internal
