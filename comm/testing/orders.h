// Orders of events: ranks that are threads run one at a time, and an order says which of them goes on. For tests of
// code whose result must not depend on who comes first: find_failing_order() draws orders from a seed, shrinks the
// first that fails, and prints how to repeat it. Used by ANNULUS_ORDERS_TEST (ranks_test.h).
//
// What a rank does between two calls of its communicator is one piece, so an order decides only what other ranks can
// notice through it. Deadlines are not measured: one passes when all ranks wait.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/threads/threads.h"

namespace annulus::testing {

// Without switches a rank goes on until it has to wait, looks in vain (Work::test()) or has ended; then the next higher
// rank that can go on does, after the highest the lowest. `switches`, ascending by event, are the exceptions.
struct Order {
  struct Switch {
    int64_t event = 0;  // the number of the decision, from 0 on
    int rank = 0;       // that goes on there
  };
  std::vector<Switch> switches;

  std::string text() const;  // "5>0 9>2"; "none" without switches
  // Raises Error(kUsage) for a text of another form.
  static Order parse(std::string_view text);
};

// Runs ranks in an order: pass it to annulus::run_ranks(). A switch to a rank that cannot go on is left out. For one
// run.
class OrderedRun final : public RankOrder {
 public:
  explicit OrderedRun(Order order) : given_(std::move(order)) {}
  // Draws: at each event, with the probability `often`, any of the ranks that can go on does.
  OrderedRun(uint64_t seed, double often) : seed_(seed), often_(often) {}

  int next(int rank, const std::vector<int>& ready, const std::string& at) override;

  // The switches that were made.
  const Order& order() const { return made_; }
  // One line for each: "event 5: rank 1 comes to ring, hop 3; rank 0 goes on".
  const std::string& events() const { return events_; }

 private:
  Order given_, made_;
  std::optional<uint64_t> seed_;
  double often_ = 0;
  int64_t event_ = 0;
  size_t used_ = 0;  // of given_.switches
  std::string events_;
};

struct OrderSearch {
  int orders = 100;  // that are tried at most, the one without switches first
  uint64_t seed = 1;
  std::optional<Order> only = std::nullopt;  // tries this one alone
};

// The search that the environment asks for: ANNULUS_TEST_ORDER (an order's text) and ANNULUS_TEST_SEED replace `only`
// and `seed`. Raises Error(kUsage).
OrderSearch search_of_environment(int orders);

struct FailingOrder {
  Order order;
  std::string failure;     // what `attempt` returned in it
  std::string events;      // OrderedRun::events()
  int tried = 0;           // how many orders were drawn until one failed
  bool repeatable = true;  // false if the order passed when it was run again: then something else decides
};

// `attempt` runs its ranks in the order that it is given and returns why they failed, or "". Tries orders until one
// fails, and takes switches out of that one as long as it still fails, in at most 300 attempts.
std::optional<FailingOrder> find_failing_order(const std::function<std::string(RankOrder&)>& attempt,
                                               const OrderSearch& search = {});

}  // namespace annulus::testing
