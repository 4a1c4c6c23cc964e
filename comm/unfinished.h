// Describes for error messages what unfinished transfers are waiting for. Internal to comm/: used by the backends that
// carry messages (comm/mpi, comm/c10d).
#pragma once

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
// "receiving 16 bytes from rank 1: not done (nor 2 more transfers)", "all_reduce: rank 3 did not come". At least one
// transfer must be unfinished. collective: the name of the collective; null for an exchange.
std::string describe_unfinished(const Communicator& comm, const std::vector<TransferState>& transfers,
                                const char* collective);

}  // namespace annulus::comm_internal
