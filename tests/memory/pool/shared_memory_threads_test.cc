// Tests shared memory that several threads use at once, as ranks that are threads of one process may: they allocate,
// lend, borrow, pass on and free in any order. Runs under the thread sanitizer, too (tools/sanitizers.sh).
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "memory/pool/shared_memory.h"
#include "memory/releasable.h"

namespace annulus::shared_memory_threads_test {
namespace {

constexpr int kThreads = 4;

// What is on its way from one thread to any other: its address, and what the memory must hold.
struct Loan {
  LentMemory lent;
  double first = 0;
};

// The loans that no thread has taken yet.
class Post {
 public:
  void send(const Loan& loan) {
    const std::lock_guard lock(mutex_);
    loans_.push_back(loan);
  }
  std::optional<Loan> take() {
    const std::lock_guard lock(mutex_);
    if (loans_.empty()) return std::nullopt;
    const Loan loan = loans_.front();
    loans_.pop_front();
    return loan;
  }

 private:
  std::mutex mutex_;
  std::deque<Loan> loans_;
};

at::Tensor borrowed_tensor(SharedMemory& memory, const LentMemory& lent) {
  const at::Tensor tensor = tensor_without_memory({lent.bytes / 8}, at::kDouble);
  give_memory(tensor, memory.borrow(lent));
  return tensor;
}

bool holds_numbers_from(const at::Tensor& tensor, double first) {
  return at::equal(tensor, at::arange(first, first + static_cast<double>(tensor.numel()), at::kDouble));
}

// Two owners that borrow from each other and from themselves. Each thread uses both: it lends tensors that it has
// filled, takes loans of other threads, passes some of them on, and keeps some tensors for a while, so that segments
// become idle, are used again and are given up all the time.
TEST(SharedMemoryThreads, NobodySeesMemoryOfAnother) {
  std::array<SharedMemory, 2> owners;
  owners[0].connect(owners[1].file());
  owners[1].connect(owners[0].file());
  std::array<Post, 2> post;  // by who may borrow
  std::atomic<int> wrong = 0, taken = 0;
  const auto work = [&](int thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    const auto below = [&](unsigned n) { return random() % n; };
    std::vector<std::pair<at::Tensor, double>> kept;
    for (int turn = 0; turn < 150; ++turn) {
      SharedMemory& owner = owners[below(2)];
      const double first = 1000.0 * (1000 * thread + turn);
      at::Tensor mine = owner.allocate({10'000 + 10'000 * static_cast<int64_t>(below(8))}, at::kDouble);
      mine.copy_(at::arange(first, first + static_cast<double>(mine.numel()), at::kDouble));
      if (!owner.holds(mine)) ++wrong;
      for (unsigned copies = 1 + below(2); copies > 0; --copies) post[below(2)].send({*owner.lend(mine), first});
      kept.emplace_back(std::move(mine), first);
      const size_t who = below(2);
      if (const std::optional<Loan> loan = post[who].take()) {
        at::Tensor theirs = borrowed_tensor(owners[who], loan->lent);
        if (!holds_numbers_from(theirs, loan->first)) ++wrong;
        if (below(3) == 0) post[below(2)].send({*owners[who].lend(theirs), loan->first});
        kept.emplace_back(std::move(theirs), loan->first);
        ++taken;
      }
      while (kept.size() > below(6)) {
        if (!holds_numbers_from(kept.front().first, kept.front().second)) ++wrong;
        kept.erase(kept.begin());
      }
      const SharedMemory::Held held = owner.held();
      if (held.used < 0 || held.idle < 0) ++wrong;
    }
    for (const auto& [tensor, first] : kept) {
      if (!holds_numbers_from(tensor, first)) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (std::thread& thread : threads) thread.join();
  for (size_t who = 0; who < 2; ++who) {
    while (const std::optional<Loan> loan = post[who].take()) {
      if (!holds_numbers_from(borrowed_tensor(owners[who], loan->lent), loan->first)) ++wrong;
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(taken, 100);
  for (const SharedMemory& owner : owners) EXPECT_EQ(owner.held().used, 0);  // every holder was counted off
}

// The last holder of a segment may be freed by another thread while its owner looks for an idle one.
TEST(SharedMemoryThreads, FreedByAnyThread) {
  SharedMemory owner;
  std::atomic<int> wrong = 0;
  for (int round = 0; round < 100; ++round) {
    at::Tensor tensor = owner.allocate({50'000}, at::kDouble);
    tensor.fill_(round);
    std::thread other([there = std::move(tensor), round, &wrong]() mutable {
      if (!there.eq(round).all().item<bool>()) ++wrong;
      there.reset();
    });
    const at::Tensor next = owner.allocate({50'000}, at::kDouble);
    next.fill_(-1);
    other.join();
    if (!next.eq(-1).all().item<bool>()) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(owner.held().used, 0);
}

}  // namespace
}  // namespace annulus::shared_memory_threads_test
