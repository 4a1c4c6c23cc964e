// See begun_collective.h.
#include "comm/mpi/begun_collective.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/checks.h"

namespace annulus::mpi_internal {

using namespace comm_internal;

namespace {

// The headers' is 0. MPI guarantees tags up to 32767; those of calls under way together must differ.
int tag_of(const Begun& call) { return 1 + static_cast<int>(call.header.call % 16384); }

}  // namespace

BegunCollective::BegunCollective(const Communicator& comm, MPI_Comm control, int64_t max_message, Begun call)
    : comm_(comm),
      control_(control),
      max_message_(max_message),
      call_(std::move(call)),
      label_(call_.label),
      reduces_(call_.reduces()),
      bytes_(static_cast<int64_t>(call_.piece().nbytes()) * (comm.size() - 1)) {
  for (Pending& round : rounds_) round.label = label_;
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
    if (done_ < count_) {
      Pending& round = slot(done_);
      test_requests(comm_, round);
      if (round.open > 0) return;
      if (reduces_) add_round();
      ++done_;
      if (posted_ < count_) post_round();
    }
    if (done_ < count_) return;
    stage_ = Stage::kComplete;
    call_.out = call_.in = held_ = at::Tensor();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

// All headers have come.
void BegunCollective::agree() {
  const std::string differences = describe_disagreement(comm_, headers_.headers, label_.counted);
  if (!differences.empty()) throw_mismatch(label_, differences);
  stage_ = Stage::kMoving;
  const int size = comm_.size(), rank = comm_.rank();
  piece_ = part_ = static_cast<int64_t>(call_.piece().nbytes());
  if (piece_ == 0) return;
  if (reduces_) {
    const int64_t width = call_.out.element_size();
    part_ = std::max<int64_t>(1, std::min(round_bytes(size, piece_), max_message_) / width) * width;
    const int64_t at_once = part_ < piece_ ? kRoundsAtOnce : 1;
    held_ = at::empty({at_once, size - 1, part_}, at::kByte);
  } else {
    char* mine = static_cast<char*>(call_.out.mutable_data_ptr()) + rank * piece_;
    if (mine != call_.in.const_data_ptr()) std::memcpy(mine, call_.in.const_data_ptr(), call_.in.nbytes());
  }
  count_ = (piece_ + part_ - 1) / part_;
  while (posted_ < std::min(count_, kRoundsAtOnce)) post_round();
}

int64_t BegunCollective::length(int64_t round) const { return std::min(part_, piece_ - round * part_); }

// Where a round's part of a peer's piece arrives.
char* BegunCollective::received(int64_t round, int peer) const {
  if (!reduces_) return static_cast<char*>(call_.out.mutable_data_ptr()) + peer * piece_;
  const int64_t row = round % kRoundsAtOnce * (comm_.size() - 1) + peer - (peer > comm_.rank() ? 1 : 0);
  return static_cast<char*>(held_.mutable_data_ptr()) + row * part_;
}

void BegunCollective::post_round() {
  const int64_t round = posted_++, bytes = length(round);
  Pending& pending = slot(round);
  pending.requests.clear();
  pending.items.clear();
  const ByteType type(bytes, max_message_);
  const int tag = tag_of(call_), size = comm_.size(), rank = comm_.rank();
  const auto* from = static_cast<const char*>(call_.in.const_data_ptr());
  for (const bool is_send : {false, true}) {
    for (int i = 1; i < size; ++i) {
      const int peer = is_send ? (rank + i) % size : (rank + size - i) % size;
      const char* part = from + (reduces_ ? peer * piece_ : 0) + round * part_;
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = is_send
                           ? MPI_Isend(part, type.count(), type.type(), peer, tag, control_, &request)
                           : MPI_Irecv(received(round, peer), type.count(), type.type(), peer, tag, control_, &request);
      post(comm_, pending, request, {at::Tensor(), peer, is_send, bytes, tag, false, {}}, code);
    }
  }
}

void BegunCollective::add_round() {
  const int64_t begin = done_ * part_;
  std::vector<const void*> parts;
  for (int r = 0; r < comm_.size(); ++r) {
    parts.push_back(r == comm_.rank() ? static_cast<const char*>(call_.in.const_data_ptr()) + r * piece_ + begin
                                      : received(done_, r));
  }
  reduce_in_rank_order(call_.out.scalar_type(), ReduceOp::kSum,
                       static_cast<char*>(call_.out.mutable_data_ptr()) + begin, parts,
                       length(done_) / call_.out.element_size());
}

const Pending* BegunCollective::under_way() const {
  if (headers_.open > 0) return &headers_;
  for (const Pending& round : rounds_) {
    if (round.open > 0) return &round;
  }
  return nullptr;
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
