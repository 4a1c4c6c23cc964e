// Divides an all_gather, a reduce_scatter or an all_reduce into messages between ranks, in steps that a backend posts
// and finishes one after the other. Internal to comm/: comm/mpi and comm/c10d carry these collectives as such messages;
// comm/threads only counts with bytes_to_other_hosts() what they would send between hosts.
//
// Thread safety: none; a backend uses the Rounds of a call from one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/headers.h"
#include "comm/hosts.h"
#include "comm/rank_order.h"

namespace annulus::comm_internal {

// A reduction goes in rounds, each of which moves a part of every rank's piece, so that little memory is needed for
// what is still to be added. A round is a step inside the groups (hosts.h) and, if there are several groups, a step
// between them. A gather receives in place, in one step, or in one between groups and one inside them. If groups have
// different numbers of ranks, each rank of a smaller group carries the pieces of several ranks. Every rank computes the
// same assignment.
//
// Example: a reduce_scatter of 6,000 floats on 4 ranks of one host. Each piece has 1,500 elements, 6,000 bytes. With
// max_message = 4000 there are two rounds, of 4,000 and 2,000 bytes of each piece; in each, a rank sends its values of
// three other pieces and receives those of three other ranks for its own.
class Rounds {
 public:
  // A message. The sender and the receiver list the messages between them in the same order in each step.
  struct Message {
    int peer = 0;
    char* data = nullptr;
    int64_t bytes = 0;
  };

  // max_message: the most bytes of one rank's piece in a round; for bf16 the sums of so many values may take twice as
  // many. The constructor takes the memory of a reduction from the pool, which drop() returns.
  Rounds(int rank, const RankHosts& hosts, int64_t max_message, const Begun& call);

  // Call it before the first step: it copies this rank's piece of an all_gather to its place.
  void begin();
  int64_t count() const { return static_cast<int64_t>(steps_.size()); }  // of the steps; 0 if there is nothing to move
  // How many steps must be finished before this one may be posted: all before it, except at most kRoundsAtOnce - 1.
  int64_t needs(int64_t step) const { return steps_[static_cast<size_t>(step)].needs; }
  // Call it once for each step, when the step is posted: it counts the bytes that go to other hosts.
  std::vector<Message> sends(int64_t step);
  std::vector<Message> receives(int64_t step) const;
  // Call it when all messages of the step are complete, in the order of the steps: it adds what a reduction received.
  void finish(int64_t step);
  // Call it after the last step: it lets the tensors of the call go.
  void end() { in_ = out_ = whole_ = at::Tensor(); }
  void drop() { held_ = at::Tensor(); }

 private:
  enum class Kind { kReduceInside, kReduceBetween, kGather, kGatherInside };
  struct Step {
    Kind kind;
    int64_t round = 0, needs = 0;
  };
  struct Range {
    int64_t begin = 0, bytes = 0;  // in bytes of the whole tensor
  };

  void add_reduction(int64_t longest, int64_t max_message);
  Range piece(int rank) const;
  Range part(int rank, int64_t round) const;
  char* bytes_at(int64_t offset) const { return static_cast<char*>(whole_.mutable_data_ptr()) + offset; }
  char* slot(int64_t round) const;
  char* value_of(int64_t round, size_t carried, int peer) const;
  char* sum_of(int64_t round, size_t row) const;
  void add_messages(const Step& step, int peer, bool is_send, std::vector<Message>& to) const;

  const int rank_;
  const RankHosts hosts_;
  const RankGroups& groups_;  // of hosts_
  const int group_;
  const ReduceOp op_;
  const SumTypes types_;
  at::Tensor in_, out_, whole_, held_;          // in_: only of an all_gather
  const int64_t elements_, width_, sum_width_;  // of the whole tensor; bytes of an element, and of a sum
  const std::vector<int> carried_;
  int64_t part_ = 0;  // bytes of each piece in a round
  std::vector<Step> steps_;
  std::shared_ptr<int64_t> to_other_hosts_;
};

// The bytes that `rank` sends to ranks of other hosts in a call that is carried in such rounds.
int64_t bytes_to_other_hosts(int rank, const RankHosts& hosts, const Begun& call);

}  // namespace annulus::comm_internal
