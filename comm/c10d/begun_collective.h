// An all_gather, a reduce_scatter or an all_reduce under way between ranks of a process group: the headers first, then
// the data in steps (rounds.h), of which none blocks. Used by c10d_communicator.cc. All of a process are moved along
// together (begun_collectives()), so that waiting for one transfer never holds up another. Under arrivals().mutex.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "comm/c10d/channel.h"
#include "comm/communicator.h"
#include "comm/headers.h"
#include "comm/rounds.h"

namespace annulus::c10d_internal {

// Messages under way together, and what they are for.
struct Pending {
  std::vector<TransferPtr> transfers;
  OpLabel label;
  const char* collective = nullptr;  // what the ranks do together; null for an exchange

  bool over() const;
  // Raises Error(kComm) where one has failed, kMismatch where another message came than was expected.
  void raise(const Communicator& comm) const;
  std::string describe_unfinished(const Communicator& comm) const;
};

// Headers of a collective on their way from and to every other rank.
struct Headers {
  Pending pending;
  comm_internal::CollectiveHeader mine;
  std::vector<comm_internal::CollectiveHeader> all;
};

// How a communicator posts what its collectives need.
class Sender {
 public:
  virtual ~Sender() = default;
  // In the lane of what is begun, which all ranks use in the same order. arrivals().mutex is held.
  virtual void post(Pending& pending, const std::vector<comm_internal::Rounds::Message>& sends,
                    const std::vector<comm_internal::Rounds::Message>& receives, const Kept& kept) = 0;
};

class BegunCollective {
 public:
  BegunCollective(const Communicator& comm, Sender& sender, comm_internal::Begun call,
                  std::shared_ptr<Headers> headers);

  // One step. The first of its communicator's that are not over alone moves data: so these go in one order on all
  // ranks.
  void advance(bool first) noexcept;

  bool complete() const { return stage_ == Stage::kComplete; }
  // Why it never will be; null while all is well. Error(kMismatch): the ranks disagree, and nothing was sent.
  const std::exception_ptr& failure() const { return failure_; }
  bool over() const { return complete() || failure_ != nullptr; }

  const Communicator& comm() const { return comm_; }
  OpLabel label() const { return call_.label; }
  bool reduces() const { return call_.reduces(); }
  std::string describe_unfinished() const;

 private:
  enum class Stage { kAgreeing, kAgreed, kMoving, kComplete };

  void post_steps();

  const Communicator& comm_;
  Sender& sender_;
  comm_internal::Begun call_;  // its tensors until it is complete
  std::shared_ptr<Headers> headers_;
  Stage stage_ = Stage::kAgreeing;
  std::exception_ptr failure_;
  std::shared_ptr<comm_internal::Rounds> rounds_;  // once it moves data
  std::deque<Pending> under_way_;                  // a step each
  int64_t posted_ = 0, done_ = 0;                  // steps
};
using BegunPtr = std::shared_ptr<BegunCollective>;

// Those of this process, in the order in which each communicator began them.
std::vector<BegunPtr>& begun_collectives();
// A pass over all of them; those that are over are dropped.
void advance_all();

}  // namespace annulus::c10d_internal
