// See rounds.h.
#include "comm/rounds.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "comm/rank_order.h"

namespace annulus::comm_internal {

Rounds::Rounds(int rank, int size, int64_t max_message, const Begun& call)
    : rank_(rank),
      size_(size),
      reduces_(call.reduces()),
      out_(call.out),
      in_(call.in),
      piece_(static_cast<int64_t>(call.piece().nbytes())) {
  if (piece_ == 0) return;
  part_ = piece_;
  if (reduces_) {
    const int64_t width = out_.element_size();
    part_ = std::max<int64_t>(1, std::min(round_bytes(size, piece_), max_message) / width) * width;
    held_ = at::empty({part_ < piece_ ? kRoundsAtOnce : 1, size - 1, part_}, at::kByte);
  } else {
    char* mine = static_cast<char*>(out_.mutable_data_ptr()) + rank * piece_;
    if (mine != in_.const_data_ptr()) std::memcpy(mine, in_.const_data_ptr(), in_.nbytes());
  }
  count_ = (piece_ + part_ - 1) / part_;
}

int64_t Rounds::at_once() const { return std::min(count_, kRoundsAtOnce); }

int64_t Rounds::length(int64_t round) const { return std::min(part_, piece_ - round * part_); }

const char* Rounds::sent(int64_t round, int peer) const {
  return static_cast<const char*>(in_.const_data_ptr()) + (reduces_ ? peer * piece_ : 0) + round * part_;
}

// Where a round's part of a peer's piece arrives.
char* Rounds::received(int64_t round, int peer) const {
  if (!reduces_) return static_cast<char*>(out_.mutable_data_ptr()) + peer * piece_;
  const int64_t row = round % kRoundsAtOnce * (size_ - 1) + peer - (peer > rank_ ? 1 : 0);
  return static_cast<char*>(held_.mutable_data_ptr()) + row * part_;
}

void Rounds::finish(int64_t round) {
  if (!reduces_) return;
  std::vector<const void*> parts;
  for (int r = 0; r < size_; ++r) parts.push_back(r == rank_ ? sent(round, r) : received(round, r));
  reduce_in_rank_order(out_.scalar_type(), ReduceOp::kSum, static_cast<char*>(out_.mutable_data_ptr()) + round * part_,
                       parts, length(round) / out_.element_size());
}

}  // namespace annulus::comm_internal
