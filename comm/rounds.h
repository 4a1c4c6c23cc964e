// How an all_gather or a reduce_scatter goes from rank to rank as messages, in rounds that a backend posts and finishes
// one after the other. Internal to comm/: for the backends that carry these as messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/headers.h"

namespace annulus::comm_internal {

// Each round moves a part of every rank's piece, so that a reduce_scatter holds little of what is to be added: an
// all_gather, which receives in place, has one.
class Rounds {
 public:
  // max_message: the most that a round holds of one rank, in bytes. Takes what a reduce_scatter holds until drop(), and
  // puts this rank's piece of an all_gather in its place.
  Rounds(int rank, int size, int64_t max_message, const Begun& call);

  int64_t count() const { return count_; }  // 0 where there is nothing to move
  int64_t at_once() const;                  // rounds that may be under way together
  int64_t length(int64_t round) const;      // bytes of a message, to and from every other rank
  const char* sent(int64_t round, int peer) const;
  char* received(int64_t round, int peer) const;
  // All messages of the round have come; rounds are finished in order.
  void finish(int64_t round);
  void drop() { out_ = in_ = held_ = at::Tensor(); }

 private:
  int rank_, size_;
  bool reduces_;
  at::Tensor out_, in_;
  int64_t piece_, part_ = 0, count_ = 0;  // bytes of a piece and of a round's part of it; rounds
  at::Tensor held_;                       // [rounds at once, other ranks, part_] bytes
};

}  // namespace annulus::comm_internal
