// See begun_collective.h.
#include "comm/mpi/begun_collective.h"

#include <utility>

namespace annulus::mpi_internal {

using namespace comm_internal;

MpiBegunCollective::MpiBegunCollective(const Communicator& comm, MPI_Comm control, int64_t max_message, Begun call)
    : BegunCollective(comm, std::move(call), max_message),
      control_(control),
      bytes_(static_cast<int64_t>(call_.whole().nbytes()) / comm.size() * (comm.size() - 1)) {
  headers_.label = call_.label;
  for (Pending& step : steps_) step.label = call_.label;
}

void MpiBegunCollective::start_headers() { mpi_internal::start_headers(comm_, control_, call_.header, headers_); }

const std::vector<CollectiveHeader>* MpiBegunCollective::headers() {
  test_requests(comm_, headers_);
  return have_headers() ? &headers_.headers : nullptr;
}

void MpiBegunCollective::start_step(int64_t number, const std::vector<Rounds::Message>& sends,
                                    const std::vector<Rounds::Message>& receives,
                                    const std::shared_ptr<const void>& /*kept*/) {
  Pending& step = slot(number);
  step.requests.clear();
  step.items.clear();
  // Headers have tag 0. MPI guarantees tags up to 32767, and the tags of calls that are under way at the same time must
  // differ.
  const int tag = 1 + static_cast<int>(call_.header.call % 16384);
  for (const bool is_send : {false, true}) {
    for (const Rounds::Message& message : is_send ? sends : receives) {
      const ByteType type(message.bytes, max_message_);
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = is_send
                           ? MPI_Isend(message.data, type.count(), type.type(), message.peer, tag, control_, &request)
                           : MPI_Irecv(message.data, type.count(), type.type(), message.peer, tag, control_, &request);
      add_request(comm_, step, request, {{message.peer, is_send, message.bytes}, {}, tag}, code);
    }
  }
}

bool MpiBegunCollective::finish_step(int64_t number) {
  Pending& step = slot(number);
  test_requests(comm_, step);
  if (step.open > 0) return false;
  finished_messages_ += static_cast<int64_t>(step.items.size());
  return true;
}

std::string MpiBegunCollective::describe_unfinished() const {
  if (!have_headers()) return mpi_internal::describe_unfinished(comm_, headers_);
  for (const Pending& step : steps_) {
    if (step.open > 0) return mpi_internal::describe_unfinished(comm_, step);
  }
  return "not done";
}

// Events are the agreement and each complete message, of steps that are finished and of those under way.
Movement MpiBegunCollective::movement() const {
  Movement moved{(have_headers() ? 1 : 0) + finished_messages_, bytes_};
  for (const Pending& step : steps_) {
    if (step.open > 0) moved.events += static_cast<int64_t>(step.items.size() - step.open);
  }
  return moved;
}

}  // namespace annulus::mpi_internal
