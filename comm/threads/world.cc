// See world.h.
#include "comm/threads/world.h"

#include <cstring>

#include "comm/checks.h"
#include "comm/rank_order.h"
#include "memory/pool/pool_tensor.h"
#include "memory/releasable.h"

namespace annulus::threads_internal {

using comm_internal::Begun;
using comm_internal::Clock;
using comm_internal::Collective;
using comm_internal::reduce_in_rank_order;

namespace {

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown exception";
  }
}

void delete_lent(void* tensor) { delete static_cast<at::Tensor*>(tensor); }

// The memory of a tensor, for another one: it lasts as long as either. The deleter marks it as lendable.
c10::DataPtr share_memory(const at::Tensor& tensor) {
  return {tensor.data_ptr(), new at::Tensor(tensor), &delete_lent, tensor.device()};
}

}  // namespace

at::Tensor make_lendable(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::Tensor tensor = tensor_without_memory(sizes, options);
  if (tensor.numel() > 0) give_memory(tensor, share_memory(pool_tensor(sizes, options, PoolPurpose::kLent)));
  return tensor;
}

bool is_lendable(const at::Tensor& tensor) { return tensor.storage().data_ptr().get_deleter() == &delete_lent; }

void pass_on(const Transfer& send, const Transfer& receive) {
  if (send.bytes == 0) return;
  if (!has_memory(receive.tensor) && is_lendable(send.tensor)) {
    return give_memory(receive.tensor, share_memory(send.tensor));
  }
  if (!has_memory(receive.tensor)) give_own_memory(receive.tensor);
  if (!send.tensor.is_cpu()) {
    receive.tensor.view({-1}).copy_(send.tensor.view({-1}));
    return;
  }
  std::memmove(receive.tensor.mutable_data_ptr(), send.tensor.const_data_ptr(), send.bytes);
}

void carry_out(const Meeting& meeting, const Begun& call, const RankGroups& groups) {
  const auto ranks = meeting.items.size(), whole = call.whole().nbytes(), bytes = whole / ranks;
  if (whole == 0) return;
  const auto in = [&](size_t rank) { return static_cast<const char*>(meeting.items[rank].tensor.const_data_ptr()); };
  const auto out = [&](size_t rank) { return static_cast<char*>(meeting.items[rank].out.mutable_data_ptr()); };
  const at::ScalarType dtype = call.in.scalar_type();
  std::vector<const void*> pieces(ranks);
  if (call.collective() == Collective::kAllReduce) {
    for (size_t r = 0; r < ranks; ++r) pieces[r] = in(r);
    // out(0) may be in(0): each element of the sum is read before it is written.
    reduce_in_rank_order(dtype, call.op(), out(0), pieces, call.in.numel(), groups);
    for (size_t r = 1; r < ranks; ++r) std::memcpy(out(r), out(0), whole);
    return;
  }
  for (size_t r = 0; r < ranks; ++r) {
    if (call.reduces()) {
      for (size_t from = 0; from < ranks; ++from) pieces[from] = in(from) + r * bytes;
      reduce_in_rank_order(dtype, ReduceOp::kSum, out(r), pieces, call.out.numel(), groups);
      continue;
    }
    for (size_t from = 0; from < ranks; ++from) {
      char* to = out(r) + from * bytes;
      if (to != in(from)) std::memcpy(to, in(from), bytes);
    }
  }
}

World::World(int n, RankOrder* order)
    : order_(order),
      wake_(static_cast<size_t>(n)),
      blocked_till_(static_cast<size_t>(n)),
      waits_for_(static_cast<size_t>(n)),
      stuck_(static_cast<size_t>(n), false),
      ended_(static_cast<size_t>(n), false) {
  if (order_ != nullptr) pass_turn(-1, "");
}

void World::begin(int rank) {
  std::unique_lock<std::mutex> lock(mutex);
  if (order_ != nullptr) await_turn(lock, rank);
}

void World::come_to(std::unique_lock<std::mutex>& lock, int rank, OpLabel label) {
  if (order_ == nullptr) return;
  pass_turn(rank, comm_internal::where(label));
  await_turn(lock, rank);
}

void World::look_in_vain(std::unique_lock<std::mutex>& lock, int rank) {
  if (order_ == nullptr) return;
  pass_turn(rank, "");
  await_turn(lock, rank);
}

void World::pass_turn(int rank, const std::string& at) {
  std::vector<int> ready;
  for (size_t r = 0; r < ended_.size(); ++r) {
    if (!ended_[r] && !blocked_till_[r]) ready.push_back(static_cast<int>(r));
  }
  if (ready.empty()) return;
  turn_ = order_->next(rank, ready, at);
  wake_[static_cast<size_t>(turn_)].notify_all();
}

void World::await_turn(std::unique_lock<std::mutex>& lock, int rank) {
  wake_[static_cast<size_t>(rank)].wait(lock, [&] { return turn_ == rank; });
}

std::string World::describe_waits() const {
  std::string text;
  for (size_t r = 0; r < waits_for_.size(); ++r) {
    if (waits_for_[r] == nullptr) continue;
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(r) + " in " + (*waits_for_[r])();
  }
  return text;
}

World::Woken World::block(std::unique_lock<std::mutex>& lock, int rank, Clock::time_point deadline,
                          const std::function<std::string()>& describe) {
  const auto me = static_cast<size_t>(rank);
  blocked_till_[me] = deadline;
  waits_for_[me] = &describe;
  size_t first = me;  // the rank with the earliest deadline
  bool all = true;
  for (size_t r = 0; r < ended_.size(); ++r) {
    if (ended_[r]) continue;
    all = all && blocked_till_[r].has_value();
    if (all && *blocked_till_[r] < *blocked_till_[first]) first = r;
  }
  if (all) {
    waits_text_ = describe_waits();
    stuck_[first] = true;
    wake(static_cast<int>(first));
  }
  if (order_ != nullptr) {
    pass_turn(rank, "");
    await_turn(lock, rank);
  }
  while (blocked_till_[me]) {
    if (wake_[me].wait_until(lock, deadline) == std::cv_status::timeout && blocked_till_[me]) {
      blocked_till_[me].reset();
      waits_for_[me] = nullptr;
      return Woken::kByDeadline;
    }
  }
  waits_for_[me] = nullptr;
  if (!stuck_[me]) return Woken::kByPeer;
  stuck_[me] = false;
  return Woken::kStuck;
}

void World::wake(int rank) {
  blocked_till_[static_cast<size_t>(rank)].reset();
  wake_[static_cast<size_t>(rank)].notify_all();
}

void World::wake_all() {
  for (size_t r = 0; r < wake_.size(); ++r) wake(static_cast<int>(r));
}

void World::end(int rank) {
  ended_[static_cast<size_t>(rank)] = true;
  wake_all();
  if (order_ != nullptr) pass_turn(rank, "");
}

void World::record_failure(int rank, std::exception_ptr error, bool own) {
  if (failed_rank_ >= 0 && (failure_is_own_ || !own)) return;
  failed_rank_ = rank;
  failure_is_own_ = own;
  failure_text_ = what_of(error);
  failure_ = std::move(error);
}

std::string World::failure_text() const {
  return failed_rank_ < 0 ? "" : "rank " + std::to_string(failed_rank_) + " failed: " + failure_text_;
}

std::string Transfer::describe(const Communicator& comm) const {
  return (is_send ? "sending " : "receiving ") + std::to_string(bytes) + (is_send ? " bytes to " : " bytes from ") +
         comm_internal::describe_ranks(comm, {peer});
}

std::vector<comm_internal::CollectiveHeader> Meeting::headers() const {
  std::vector<comm_internal::CollectiveHeader> out;
  for (const Item& item : items) out.push_back(item.header);
  return out;
}

std::vector<int> Meeting::missing() const {
  std::vector<int> out;
  for (size_t r = 0; r < here.size(); ++r) {
    if (!here[r]) out.push_back(static_cast<int>(r));
  }
  return out;
}

void Group::kill(const std::string& why) {
  if (dead.empty()) dead = why;
  world->wake_all();
}

std::string Group::failure() const {
  const std::string failed = world->failure_text();
  return failed.empty() ? dead : failed;
}

}  // namespace annulus::threads_internal
