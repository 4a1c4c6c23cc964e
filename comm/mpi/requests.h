// Requests of MPI that may be under way, and how a rank waits for them. Internal to comm/mpi.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/deadline.h"
#include "comm/headers.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/unfinished.h"

namespace annulus::mpi_internal {

// How far a transfer has come: what poll_until() goes by.
struct Movement {
  int64_t events = 0;  // messages that have been found or are through
  int64_t open = 0;    // bytes that are not
};

// The time that the rest of a transfer on this host takes. Before anything of it has come, when all goes well, 20 us
// and 8 GB/s, and no longer: what has not come by then waits for a rank that still computes, perhaps for this core.
// Once a message has been found its sender takes part, and both ranks must be in calls of MPI, of which each moves a
// piece, until all is through: at the speed of memory that others use as well.
inline Seconds expected_time(Movement moved) {
  return Seconds(20e-6 + static_cast<double>(moved.open) / (moved.events == 0 ? 8e9 : 1e9));
}

// Calls done() until it is true or the deadline has passed. Spins, giving way to other threads, for the time that the
// transfer should take, anew whenever movement() tells of another event; then sleeps for an eighth of the time waited
// since, at most a millisecond, with a burst of calls in between: a late message is noticed within an eighth of its
// lateness, and a waiting rank leaves its core to the others.
template <typename Done, typename Moves>
bool poll_until(Done done, Moves movement, comm_internal::Clock::time_point deadline) {
  constexpr int kBurst = 16, kLongBurst = 256;
  auto start = comm_internal::Clock::now();
  for (int64_t events = 0;;) {
    // What moves is not interrupted for others after every megabyte.
    for (int i = 0; i < (events > 0 ? kLongBurst : kBurst); ++i) {
      if (done()) return true;
    }
    const auto now = comm_internal::Clock::now();
    if (now >= deadline) return done();
    const Movement moved = movement();
    if (std::exchange(events, moved.events) != moved.events) start = now;
    const Seconds waited = now - start, expected = expected_time(moved);
    if (waited < expected) {
      sched_yield();
      continue;
    }
    const Seconds pause(std::clamp((waited - expected).count() / 8, 10e-6, 1e-3));
    std::this_thread::sleep_for(std::min<Seconds>(pause, deadline - now));
  }
}

// `bytes` bytes as (count, type): MPI counts are 31 bits. Freed at once after posting, as MPI allows.
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

// What MPI may still read or write. When its wait fails it is never freed.
struct Pending {
  struct Item : comm_internal::TransferState {
    at::Tensor tensor;
    int tag = 0;
    at::Tensor extra;  // a collective's second buffer
  };
  std::vector<MPI_Request> requests;  // null: a receive whose message has not come, or done
  std::vector<Item> items;            // beside requests
  size_t open = 0;                    // items not done
  int64_t found = 0;                  // messages that have been matched with a receive
  OpLabel label;
  const char* collective = nullptr;  // what the ranks do together; null for an exchange
  std::string mismatch;              // a message that came was not the one expected
  std::vector<comm_internal::CollectiveHeader> headers;
  comm_internal::CollectiveHeader mine;
  // Scratch of Testsome.
  std::vector<int> indices;
  std::vector<MPI_Status> statuses;
};
using PendingPtr = std::shared_ptr<Pending>;

// Records a request that a non-blocking call has started. Raises Error(kComm) where it could not.
void post(const Communicator& comm, Pending& pending, MPI_Request request, Pending::Item item, int code);
// Posts what lets every rank of comm know the others' headers: `mine` to every rank, and theirs into pending.headers.
void post_headers(const Communicator& comm, MPI_Comm control, const comm_internal::CollectiveHeader& mine,
                  OpLabel label, Pending& pending);
// One pass over the requests. Raises Error(kComm) where one has failed.
void test_requests(const Communicator& comm, Pending& pending);

Movement movement(const Pending& pending);
std::string describe_unfinished(const Communicator& comm, const Pending& pending);

}  // namespace annulus::mpi_internal
