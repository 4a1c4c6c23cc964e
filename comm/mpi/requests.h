// MPI requests that may be under way. Internal to comm/mpi. Thread safety: the caller holds the mutex of the runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/headers.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/mpi/poll_until.h"
#include "comm/transfer_state.h"
#include "memory/pool/shared_memory.h"

namespace annulus::mpi_internal {

// `bytes` bytes as an MPI count and datatype, because counts are 31 bits. It may be destroyed as soon as the request is
// posted, as MPI allows.
class ByteType {
 public:
  ByteType(int64_t bytes, int64_t piece) {
    if (bytes <= piece) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(static_cast<int>(piece), MPI_BYTE, &block), "MPI_Type_contiguous");
    const std::array<int, 2> lengths{static_cast<int>(bytes / piece), static_cast<int>(bytes % piece)};
    const std::array<MPI_Aint, 2> offsets{0, static_cast<MPI_Aint>(bytes / piece * piece)};
    const std::array<MPI_Datatype, 2> types{block, MPI_BYTE};
    const int code = MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type_);
    MPI_Type_free(&block);
    check_mpi(code, "MPI_Type_create_struct");
    owned_ = true;
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~ByteType() {
    if (owned_) MPI_Type_free(&type_);
  }
  ByteType(const ByteType&) = delete;
  ByteType& operator=(const ByteType&) = delete;
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
  bool owned_ = false;
};

// Requests of one operation and the memory that MPI may still read or write for them. If the wait for them fails, it is
// never freed.
struct Pending {
  struct Item : comm_internal::TransferState {
    at::Tensor tensor = {};
    int tag = 0;
    // The address that is sent or received in place of the tensor's elements, if the tensor is lent.
    std::shared_ptr<LentMemory> lent = nullptr;
  };
  std::vector<MPI_Request> requests;  // MPI_REQUEST_NULL: complete, or a receive whose message has not come
  std::vector<Item> items;            // items[i] belongs to requests[i]
  size_t open = 0;                    // the number of items that are not done
  int64_t found = 0;                  // the number of messages that have been matched with a receive
  std::vector<size_t> loans;          // the items whose address is being received
  OpLabel label;
  const char* collective = nullptr;  // the name of the collective; null for an exchange
  std::string mismatch;              // the error if a message arrived that was not the expected one
  std::vector<comm_internal::CollectiveHeader> headers;
  comm_internal::CollectiveHeader mine;
  // Outputs of MPI_Testsome, kept here so that a pass allocates nothing.
  std::vector<int> indices;
  std::vector<MPI_Status> statuses;
};
using PendingPtr = std::shared_ptr<Pending>;

// Adds a request that a non-blocking call has started. Raises Error(kComm) if `code`, the result of the call, is an
// error.
void add_request(const Communicator& comm, Pending& pending, MPI_Request request, Pending::Item item, int code);
// Starts the exchange of headers: sends `mine` to every other rank of comm and receives theirs into pending.headers.
void start_headers(const Communicator& comm, MPI_Comm control, const comm_internal::CollectiveHeader& mine,
                   Pending& pending);
// Makes one pass over the requests. Raises Error(kComm) if one has failed.
void test_requests(const Communicator& comm, Pending& pending);

Movement movement(const Pending& pending);
std::string describe_unfinished(const Communicator& comm, const Pending& pending);

}  // namespace annulus::mpi_internal
