// How an all_gather, a reduce_scatter or an all_reduce goes from rank to rank as messages, in steps that a backend
// posts and finishes one after the other. Internal to comm/: for the backends that carry these as messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/headers.h"
#include "comm/hosts.h"
#include "comm/rank_order.h"

namespace annulus::comm_internal {

// A reduction goes in rounds, each of which moves a part of every rank's piece, so that little is held of what is to be
// added: a step inside the groups (hosts.h) and, where there are several, one between them. What is gathered is
// received in place: one step, or one between groups and one inside them. Where groups have different numbers of ranks,
// those of a smaller one carry pieces of several ranks each; every rank works out the same.
class Rounds {
 public:
  // A message, as its two ranks see it. Two ranks list their messages of a step in one order.
  struct Message {
    int peer = 0;
    char* data = nullptr;
    int64_t bytes = 0;
  };

  // max_message: the most that a round holds of one rank, in bytes of values; their sums may be twice as long. Takes
  // what a reduction holds until drop(), and puts this rank's piece of an all_gather in its place.
  Rounds(int rank, const RankHosts& hosts, int64_t max_message, const Begun& call);

  int64_t count() const { return static_cast<int64_t>(steps_.size()); }  // 0 where there is nothing to move
  // How many steps must be finished before this one may be posted: at least all but the last kRoundsAtOnce - 1 before
  // it.
  int64_t needs(int64_t step) const { return steps_[static_cast<size_t>(step)].needs; }
  // To be asked once for each step, when it is posted. Counts what goes to other hosts.
  std::vector<Message> sends(int64_t step);
  std::vector<Message> receives(int64_t step) const;
  // All messages of the step are through; steps are finished in order.
  void finish(int64_t step);
  void drop() { out_ = whole_ = held_ = at::Tensor(); }

 private:
  enum class Kind { kReduceInside, kReduceBetween, kGather, kGatherInside };
  struct Step {
    Kind kind;
    int64_t round = 0, needs = 0;
  };
  struct Range {
    int64_t begin = 0, bytes = 0;  // of the whole
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
  at::Tensor out_, whole_, held_;
  const int64_t elements_, width_, sum_width_;  // of the whole; bytes of an element
  const std::vector<int> carried_;
  int64_t part_ = 0;  // bytes of a round's part
  std::vector<Step> steps_;
  std::shared_ptr<int64_t> to_other_hosts_;
};

// What `rank` sends to ranks of other hosts in a call that all ranks carry so, in bytes.
int64_t bytes_to_other_hosts(int rank, const RankHosts& hosts, const Begun& call);

}  // namespace annulus::comm_internal
