// What the ranks of one run share in memory: which ranks wait, which have ended, which transfers were posted, and which
// ranks have come to a meeting. Used by threads.cc alone. World::mutex guards everything.
//
// With a RankOrder one rank has the turn, and the others stand still until it is theirs: a rank passes the turn on when
// it comes to a call, when it has to wait and when it ends.
//
// A wait that can only end at its deadline fails earlier: once every rank that has not ended waits here, nothing can
// arrive any more, and the wait with the earliest deadline fails at once, with the error that it would have raised at
// that deadline. This requires that each rank communicates from one thread, as the contract of Communicator demands.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/deadline.h"
#include "comm/headers.h"
#include "comm/hosts.h"
#include "comm/threads/threads.h"

namespace annulus::threads_internal {

class World {
 public:
  // order: null if the system chooses which ranks run. It must outlive the World.
  explicit World(int n, RankOrder* order = nullptr);

  std::mutex mutex;

  bool ordered() const { return order_ != nullptr; }
  // In an order: waits until it is this rank's turn for the first time.
  void begin(int rank);
  // In an order: the rank comes to the operation `label`, and goes on when it is its turn again. `lock` holds the
  // mutex.
  void come_to(std::unique_lock<std::mutex>& lock, int rank, OpLabel label);
  // In an order: the rank has looked in vain for what it needs, and lets others go on.
  void look_in_vain(std::unique_lock<std::mutex>& lock, int rank);

  // Why a blocked rank continues. kStuck: every rank waits.
  enum class Woken { kByPeer, kByDeadline, kStuck };
  // Blocks the calling thread, which must be that of `rank`, until it is woken. `lock` holds the mutex. In an order,
  // where time means nothing, a deadline passes only when every rank waits. `describe` says for whom the rank waits:
  // "ring, hop 3: receiving 16 bytes from rank 1".
  Woken block(std::unique_lock<std::mutex>& lock, int rank, comm_internal::Clock::time_point deadline,
              const std::function<std::string()>& describe);
  // Who waited for whom when every rank waited: "rank 0 in ring, hop 3: receiving 16 bytes from rank 1; rank 1 in ...".
  const std::string& waits() const { return waits_text_; }
  // Call it after a change, for every rank whose wait the change may end.
  void wake(int rank);
  void wake_all();

  // Records that the rank's function has returned or thrown.
  void end(int rank);
  bool ended(int rank) const { return ended_[static_cast<size_t>(rank)]; }

  // Keeps one of the errors that ranks throw: the first whose cause is the rank's own, otherwise the first. `own` is
  // false for an error that another rank's failure caused.
  void record_failure(int rank, std::exception_ptr error, bool own);
  // "rank 2 failed: no row 17"; empty as long as no rank has failed.
  std::string failure_text() const;
  std::exception_ptr failure() const { return failure_; }

 private:
  void pass_turn(int rank, const std::string& at);
  void await_turn(std::unique_lock<std::mutex>& lock, int rank);
  std::string describe_waits() const;

  RankOrder* const order_;
  int turn_ = -1;                                                              // the rank that runs, in an order
  std::deque<std::condition_variable> wake_;                                   // one for each rank
  std::vector<std::optional<comm_internal::Clock::time_point>> blocked_till_;  // set while a rank is blocked
  std::vector<const std::function<std::string()>*> waits_for_;                 // set while a rank is in block()
  std::string waits_text_;
  std::vector<bool> stuck_;
  std::vector<bool> ended_;
  int failed_rank_ = -1;
  bool failure_is_own_ = false;
  std::exception_ptr failure_;
  std::string failure_text_;
};

// One posted send or receive.
struct Transfer {
  enum class State { kPosted, kCopying, kDone, kFailed };
  at::Tensor tensor;  // kept until the transfer is done, because a peer may be copying
  int self = 0;       // self and peer are ranks of the group
  int peer = 0;
  bool is_send = false;
  size_t bytes = 0;
  std::string where;
  State state = State::kPosted;
  std::string error;

  // "receiving 16 bytes from rank 1". comm: the communicator that self and peer are ranks of.
  std::string describe(const Communicator& comm) const;
};

// Gives the receiver the elements: the sender's memory, if the receiver has none and the sender's tensor can be lent,
// and otherwise a copy.
void pass_on(const Transfer& send, const Transfer& receive);
// A tensor that can be lent, and whether a tensor is one or has memory of one.
at::Tensor make_lendable(at::IntArrayRef sizes, const at::TensorOptions& options);
bool is_lendable(const at::Tensor& tensor);

struct Group;

// One meeting of all ranks of a group, with what each rank has brought.
struct Meeting {
  struct Item {
    comm_internal::CollectiveHeader header;
    at::Tensor tensor;
    at::Tensor out = {};  // for a collective that was begun
    int color = 0;
    int key = 0;
  };
  explicit Meeting(int n) : items(static_cast<size_t>(n)), here(static_cast<size_t>(n), false) {}
  const at::Tensor& tensor(int rank) const { return items[static_cast<size_t>(rank)].tensor; }
  std::vector<comm_internal::CollectiveHeader> headers() const;
  std::vector<int> missing() const;  // the ranks that have not come

  std::vector<Item> items;
  std::vector<bool> here;
  int arrived = 0;
  bool carried_out = false;                      // the rank that came last has carried out what was begun
  std::map<int, std::shared_ptr<Group>> groups;  // of a split, by color; the first rank of each makes its group
};

// Carries out a collective that all ranks have begun, on the tensors that they brought.
void carry_out(const Meeting& meeting, const comm_internal::Begun& call, const RankGroups& groups);

// The shared part of one communicator.
struct Group {
  Group(std::shared_ptr<World> w, std::vector<int> ranks) : world(std::move(w)), world_rank(std::move(ranks)) {}
  int size() const { return static_cast<int>(world_rank.size()); }
  int in_world(int rank) const { return world_rank[static_cast<size_t>(rank)]; }

  void wake(int rank) { world->wake(in_world(rank)); }
  bool ended(int rank) const { return world->ended(in_world(rank)); }
  // From now on no wait of this group succeeds. The first reason is kept.
  void kill(const std::string& why);
  // Why no wait can succeed; empty if waits can.
  std::string failure() const;

  std::shared_ptr<World> world;
  std::vector<int> world_rank;
  std::string dead;
  // Transfers that are posted and not yet matched, by (sender, receiver).
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> sends;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> receives;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;  // by number, until all ranks have arrived
};

}  // namespace annulus::threads_internal
