// What the ranks of one run share in memory: who waits, who has ended, what was posted and who has come to a meeting.
// Used by threads.cc alone. Everything is guarded by World::mutex.
//
// A wait that can end only at its deadline is not sat out: once every rank that has not ended waits in here, nothing
// can come any more, and the wait whose deadline would be first fails at once, as it would have failed then. That takes
// ranks that communicate from one thread each, as the contract of Communicator has it.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/deadline.h"
#include "comm/headers.h"

namespace annulus::threads_internal {

class World {
 public:
  explicit World(int n);

  std::mutex mutex;

  // Why a blocked rank goes on.
  enum class Woken { kByPeer, kByDeadline, kStuck };
  // Blocks the calling thread, which is `rank`'s, until it is woken. lock holds the mutex.
  Woken block(std::unique_lock<std::mutex>& lock, int rank, comm_internal::Clock::time_point deadline);
  // To be called for every rank whose wait a change may end, with the change made.
  void wake(int rank);
  void wake_all();

  // The rank's function has returned, or thrown.
  void end(int rank);
  bool ended(int rank) const { return ended_[static_cast<size_t>(rank)]; }

  // Keeps what a rank threw: the first that failed by itself, else the first. `own`: not because of another rank.
  void record_failure(int rank, std::exception_ptr error, bool own);
  // "rank 2 failed: no row 17"; empty while none has.
  std::string failure_text() const;
  std::exception_ptr failure() const { return failure_; }

 private:
  std::deque<std::condition_variable> wake_;                                   // one a rank
  std::vector<std::optional<comm_internal::Clock::time_point>> blocked_till_;  // set while a rank is blocked
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
  at::Tensor tensor;  // held until the transfer is done: a peer may be copying
  int self = 0;       // ranks of the group
  int peer = 0;
  bool is_send = false;
  size_t bytes = 0;
  std::string where;
  State state = State::kPosted;
  std::string error;

  // "receiving 16 bytes from rank 1"; of a rank of comm.
  std::string describe(const Communicator& comm) const;
};

struct Group;

// One meeting of all ranks of a group: what each has brought.
struct Meeting {
  struct Item {
    comm_internal::CollectiveHeader header;
    at::Tensor tensor;
    at::Tensor out = {};  // of what was begun
    int color = 0;
    int key = 0;
  };
  explicit Meeting(int n) : items(static_cast<size_t>(n)), here(static_cast<size_t>(n), false) {}
  const at::Tensor& tensor(int rank) const { return items[static_cast<size_t>(rank)].tensor; }
  std::vector<comm_internal::CollectiveHeader> headers() const;

  std::vector<Item> items;
  std::vector<bool> here;
  int arrived = 0;
  bool carried_out = false;                      // what was begun, by the rank that came last
  std::map<int, std::shared_ptr<Group>> groups;  // of a split, by color: made by whoever asks first
};

// The shared part of one communicator.
struct Group {
  Group(std::shared_ptr<World> w, std::vector<int> ranks) : world(std::move(w)), world_rank(std::move(ranks)) {}
  int size() const { return static_cast<int>(world_rank.size()); }
  int in_world(int rank) const { return world_rank[static_cast<size_t>(rank)]; }

  void wake(int rank) { world->wake(in_world(rank)); }
  bool ended(int rank) const { return world->ended(in_world(rank)); }
  // No wait of this group succeeds any more. The first reason stays.
  void kill(const std::string& why);
  // Why none can, or empty.
  std::string hopeless() const;

  std::shared_ptr<World> world;
  std::vector<int> world_rank;
  std::string dead;
  // Posted and not yet matched, by (sender, receiver).
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> sends;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> receives;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;  // by number, until all have arrived
};

}  // namespace annulus::threads_internal
