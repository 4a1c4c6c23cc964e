// See begun_collective.h.
#include "comm/mpi/begun_collective.h"

#include <utility>

#include "comm/checks.h"

namespace annulus::mpi_internal {

using namespace comm_internal;

namespace {

// The tag of the data of a call. Headers have tag 0. MPI guarantees tags up to 32767, and the tags of calls that are
// under way at the same time must differ.
int tag_of(const Begun& call) { return 1 + static_cast<int>(call.header.call % 16384); }

}  // namespace

BegunCollective::BegunCollective(const Communicator& comm, MPI_Comm control, int64_t max_message, Begun call)
    : comm_(comm),
      control_(control),
      max_message_(max_message),
      call_(std::move(call)),
      label_(call_.label),
      reduces_(call_.reduces()),
      bytes_(static_cast<int64_t>(call_.whole().nbytes()) / comm.size() * (comm.size() - 1)) {
  for (Pending& step : pending_) step.label = label_;
}

void BegunCollective::start() { post_headers(comm_, control_, call_.header, label_, headers_); }

void BegunCollective::advance() noexcept {
  if (over()) return;
  try {
    if (stage_ == Stage::kAgreeing) {
      test_requests(comm_, headers_);
      if (headers_.open > 0) return;
      agree();
    }
    if (done_ < rounds_->count()) {
      Pending& step = slot(done_);
      test_requests(comm_, step);
      if (step.open > 0) return;
      through_ += static_cast<int64_t>(step.items.size());
      rounds_->finish(done_++);
      post_steps();
    }
    if (done_ < rounds_->count()) return;
    stage_ = Stage::kComplete;
    call_.out = call_.in = at::Tensor();
    rounds_->drop();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

// Compares the headers, once all have come.
void BegunCollective::agree() {
  const std::string differences = describe_disagreement(comm_, headers_.headers, label_.counted);
  if (!differences.empty()) throw_mismatch(label_, differences);
  stage_ = Stage::kMoving;
  rounds_.emplace(comm_.rank(), comm_.hosts(), max_message_, call_);
  post_steps();
}

// Posts the steps that may be posted.
void BegunCollective::post_steps() {
  while (posted_ < rounds_->count() && rounds_->needs(posted_) <= done_) post_step(posted_++);
}

void BegunCollective::post_step(int64_t step) {
  Pending& pending = slot(step);
  pending.requests.clear();
  pending.items.clear();
  const int tag = tag_of(call_);
  for (const bool is_send : {false, true}) {
    for (const Rounds::Message& message : is_send ? rounds_->sends(step) : rounds_->receives(step)) {
      const ByteType type(message.bytes, max_message_);
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = is_send
                           ? MPI_Isend(message.data, type.count(), type.type(), message.peer, tag, control_, &request)
                           : MPI_Irecv(message.data, type.count(), type.type(), message.peer, tag, control_, &request);
      post(comm_, pending, request, {{message.peer, is_send, message.bytes}, {}, tag, {}}, code);
    }
  }
}

const Pending* BegunCollective::under_way() const {
  if (headers_.open > 0) return &headers_;
  for (const Pending& step : pending_) {
    if (step.open > 0) return &step;
  }
  return nullptr;
}

// Events are the agreement and each complete message, of steps that are done and of those under way.
Movement BegunCollective::movement() const {
  Movement moved{(agreed() ? 1 : 0) + through_, bytes_};
  for (const Pending& step : pending_) {
    if (step.open > 0) moved.events += static_cast<int64_t>(step.items.size() - step.open);
  }
  return moved;
}

std::string describe_unfinished(const Communicator& comm, const BegunCollective& begun) {
  const Pending* pending = begun.under_way();
  return pending == nullptr ? "not done" : describe_unfinished(comm, *pending);
}

void advance_all(std::vector<std::shared_ptr<BegunCollective>>& begun) {
  for (const auto& collective : begun) collective->advance();
  std::erase_if(begun, [](const auto& collective) { return collective->over(); });
}

}  // namespace annulus::mpi_internal
