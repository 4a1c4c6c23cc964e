// Tests of memory/storage.h: the sweep over lifetimes against counting step by step, and which buffer takes over the
// storage of which.
#include "memory/storage.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

namespace annulus::storage_test {
namespace {

constexpr int kSteps = 9;

Storage any_storage() {
  Storage storage;
  for (int i = *rc::gen::inRange(0, 25); i > 0; --i) {
    const int first = *rc::gen::inRange(0, kSteps), last = *rc::gen::inRange(first - 1, std::min(first + 4, kSteps));
    storage.add({*rc::gen::element<int64_t>(0, 1, 3, 100), *rc::gen::inRange(0, 3), {first, last}});
  }
  return storage;
}

bool alive(const StoredBuffer& b, int step) { return b.life.first <= step && step <= b.life.last; }

RC_GTEST_PROP(Storage, PeakIsTheMaximumOverTheSteps, ()) {
  const Storage storage = any_storage();
  const std::array<int64_t, 3> weights = {*rc::gen::inRange(0, 3), *rc::gen::inRange(0, 3), 7};
  const std::vector<int64_t> in_step = storage.held(weights);
  int64_t most = 0;
  for (int step = 0; step < kSteps; ++step) {
    int64_t held = 0;
    for (const StoredBuffer& b : storage.buffers()) {
      if (alive(b, step)) held += b.size * weights[static_cast<size_t>(b.pool)];
    }
    const auto s = static_cast<size_t>(step);
    RC_ASSERT((s < in_step.size() ? in_step[s] : 0) == held);
    most = std::max(most, held);
  }
  RC_ASSERT(storage.peak(weights) == most);
}

// Each successor fits, begins when its predecessor ends, and has only one predecessor. No buffer that could have a
// successor goes without.
RC_GTEST_PROP(Storage, SuccessorsFitAndFollowImmediately, ()) {
  const Storage storage = any_storage();
  const std::vector<StoredBuffer>& all = storage.buffers();
  const std::vector<int> successors = storage.successors();
  RC_ASSERT(successors.size() == all.size());
  const auto fits = [](const StoredBuffer& from, const StoredBuffer& to) {
    return !from.life.empty() && !to.life.empty() && from.size == to.size && from.pool == to.pool &&
           from.life.last + 1 == to.life.first;
  };
  std::set<int> given;
  for (size_t b = 0; b < all.size(); ++b) {
    if (successors[b] < 0) continue;
    RC_ASSERT(fits(all[b], all[static_cast<size_t>(successors[b])]));
    RC_ASSERT(given.insert(successors[b]).second);
  }
  for (size_t from = 0; from < all.size(); ++from) {
    for (size_t to = 0; to < all.size(); ++to) {
      RC_ASSERT(successors[from] >= 0 || given.count(static_cast<int>(to)) || !fits(all[from], all[to]));
    }
  }
}

TEST(Storage, RingOfBlocksTakesTwoBuffers) {
  Storage storage;
  for (int i = 0; i < 6; ++i) storage.add({10, 0, {i, i + 1}});
  EXPECT_EQ(storage.peak(std::array<int64_t, 1>{4}), 2 * 10 * 4);
  EXPECT_EQ(storage.successors(), (std::vector<int>{2, 3, 4, 5, -1, -1}));
}

}  // namespace
}  // namespace annulus::storage_test
