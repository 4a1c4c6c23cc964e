// See requests.h.
#include "comm/mpi/requests.h"

#include <utility>

#include "comm/checks.h"
#include "memory/releasable.h"

namespace annulus::mpi_internal {

void add_request(const Communicator& comm, Pending& pending, MPI_Request request, Pending::Item item, int code) {
  if (code != MPI_SUCCESS) {
    comm_internal::throw_comm(pending.label, describe(comm, item) + " could not be started: " + mpi_error_text(code));
  }
  pending.requests.push_back(request);
  pending.items.push_back(std::move(item));
  ++pending.open;
}

void start_headers(const Communicator& comm, MPI_Comm control, const comm_internal::CollectiveHeader& mine,
                   Pending& pending) {
  constexpr int kDirectHeaders = 32;
  constexpr int kBytes = static_cast<int>(sizeof mine);
  const int size = comm.size(), rank = comm.rank();
  pending.collective = "waiting for all ranks";
  pending.mine = mine;
  pending.headers.resize(static_cast<size_t>(size));
  pending.headers[static_cast<size_t>(rank)] = mine;
  if (size > kDirectHeaders) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int code =
        MPI_Iallgather(&pending.mine, kBytes, MPI_BYTE, pending.headers.data(), kBytes, MPI_BYTE, control, &request);
    return add_request(comm, pending, request, {{-1, false, kBytes}, {}, 0}, code);
  }
  for (const bool is_send : {false, true}) {
    for (int i = 1; i < size; ++i) {
      const int peer = (rank + i) % size;
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = is_send ? MPI_Isend(&pending.mine, kBytes, MPI_BYTE, peer, 0, control, &request)
                               : MPI_Irecv(&pending.headers[static_cast<size_t>(peer)], kBytes, MPI_BYTE, peer, 0,
                                           control, &request);
      add_request(comm, pending, request, {{peer, is_send, kBytes}, {}, 0}, code);
    }
  }
}

void test_requests(const Communicator& comm, Pending& p) {
  if (p.open == 0) return;
  p.indices.resize(p.requests.size());
  p.statuses.resize(p.requests.size());
  int done = 0;
  const int code =
      MPI_Testsome(static_cast<int>(p.requests.size()), p.requests.data(), &done, p.indices.data(), p.statuses.data());
  if (code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
  if (done == MPI_UNDEFINED) return;  // no message has come yet
  for (int i = 0; i < done; ++i) {
    Pending::Item& item = p.items[static_cast<size_t>(p.indices[static_cast<size_t>(i)])];
    const int error = p.statuses[static_cast<size_t>(i)].MPI_ERROR;
    if (code == MPI_ERR_IN_STATUS && error != MPI_SUCCESS) {
      comm_internal::throw_comm(p.label, describe(comm, item) + " failed: " + mpi_error_text(error));
    }
    item.done = true;
    --p.open;
  }
}

Movement movement(const Pending& pending) {
  Movement moved{pending.found + static_cast<int64_t>(pending.items.size() - pending.open), 0};
  // In a collective of MPI all ranks take part already: they have exchanged their headers.
  if (pending.collective != nullptr && pending.headers.empty()) ++moved.events;
  for (const Pending::Item& item : pending.items) {
    if (!item.done && !item.lent && (!item.tensor.defined() || has_memory(item.tensor))) moved.open += item.bytes;
  }
  return moved;
}

std::string describe_unfinished(const Communicator& comm, const Pending& pending) {
  return comm_internal::describe_unfinished(comm, {pending.items.begin(), pending.items.end()}, pending.collective);
}

}  // namespace annulus::mpi_internal
