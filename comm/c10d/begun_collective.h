// An all_gather, a reduce_scatter or an all_reduce that is under way between the ranks of a process group. The headers
// are exchanged first; then the data travel in steps (rounds.h), none of which blocks. Used by c10d_communicator.cc.
// All of these in a process are advanced together (begun_collectives()), so that waiting for one transfer never delays
// another. Thread safety: the caller holds arrivals().mutex.
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

// Messages of one operation that are under way together.
struct Pending {
  std::vector<TransferPtr> transfers;
  OpLabel label;
  const char* collective = nullptr;  // the name of the collective; null for an exchange

  bool over() const;
  // Raises Error(kComm) if a message has failed, and Error(kMismatch) if another message came than was expected.
  void raise(const Communicator& comm) const;
  std::string describe_unfinished(const Communicator& comm) const;
};

// The headers of a collective, on their way to and from every other rank.
struct Headers {
  Pending pending;
  comm_internal::CollectiveHeader mine;
  std::vector<comm_internal::CollectiveHeader> all;
};

// Posts the messages of a begun collective. The communicator implements it.
class Sender {
 public:
  virtual ~Sender() = default;
  // Posts in Lane::kBegun, which all ranks use in the same order. The caller holds arrivals().mutex.
  virtual void post(Pending& pending, const std::vector<comm_internal::Rounds::Message>& sends,
                    const std::vector<comm_internal::Rounds::Message>& receives, const Kept& kept) = 0;
};

class BegunCollective {
 public:
  BegunCollective(const Communicator& comm, Sender& sender, comm_internal::Begun call,
                  std::shared_ptr<Headers> headers);

  // Advances as far as the messages that have come allow. first: it is the first of its communicator's collectives that
  // are not over. Only that one moves data, so that the data of collectives are posted in the same order on all ranks.
  void advance(bool first) noexcept;

  bool complete() const { return stage_ == Stage::kComplete; }
  // Why it will never be complete; null without an error. With Error(kMismatch), the ranks disagree and no data were
  // sent.
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
  comm_internal::Begun call_;  // keeps the tensors until the collective is complete
  std::shared_ptr<Headers> headers_;
  Stage stage_ = Stage::kAgreeing;
  std::exception_ptr failure_;
  std::shared_ptr<comm_internal::Rounds> rounds_;  // once it moves data
  std::deque<Pending> under_way_;                  // one Pending for each posted step that is not done
  int64_t posted_ = 0, done_ = 0;                  // steps
};
using BegunPtr = std::shared_ptr<BegunCollective>;

// The collectives of this process that are under way, in the order in which each communicator began them.
std::vector<BegunPtr>& begun_collectives();
// Advances each of them, and removes those that are over.
void advance_all();

}  // namespace annulus::c10d_internal
