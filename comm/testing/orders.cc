// See orders.h.
#include "comm/testing/orders.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <utility>

#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus::testing {
namespace {

constexpr int kMostShrinks = 300;

template <class Number>
bool read_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= 0;
}

// Runs `attempt` in an order, of which `run` then knows what was done.
FailingOrder attempt_in(OrderedRun& run, const std::function<std::string(RankOrder&)>& attempt) {
  FailingOrder out;
  out.failure = attempt(run);
  out.order = run.order();
  out.events = run.events();
  return out;
}

// Takes parts of the switches out, halves first and single ones last, as long as what remains fails.
FailingOrder shrunk(FailingOrder best, const std::function<std::string(RankOrder&)>& attempt) {
  int attempts = 0;
  for (size_t part = std::max<size_t>(1, best.order.switches.size() / 2); attempts < kMostShrinks;) {
    bool smaller = false;
    for (size_t begin = 0; begin < best.order.switches.size() && attempts < kMostShrinks;) {
      Order fewer = best.order;
      const auto first = fewer.switches.begin() + static_cast<std::ptrdiff_t>(begin);
      fewer.switches.erase(first, first + static_cast<std::ptrdiff_t>(std::min(part, fewer.switches.size() - begin)));
      OrderedRun run(fewer);
      FailingOrder tried = attempt_in(run, attempt);
      ++attempts;
      if (tried.failure.empty() || tried.order.switches.size() >= best.order.switches.size()) {
        begin += part;
        continue;
      }
      best = std::move(tried);
      smaller = true;
    }
    if (part == 1 && !smaller) break;
    part = std::max<size_t>(1, part / 2);
  }
  return best;
}

}  // namespace

std::string Order::text() const {
  std::string text;
  for (const Switch& one : switches) {
    text += (text.empty() ? "" : " ") + std::to_string(one.event) + ">" + std::to_string(one.rank);
  }
  return text.empty() ? "none" : text;
}

Order Order::parse(std::string_view text) {
  Order order;
  if (text == "none") return order;
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view word = rest.substr(0, rest.find(' '));
    rest.remove_prefix(std::min(rest.size(), word.size() + 1));
    const size_t arrow = word.find('>');
    Switch one;
    if (arrow == std::string_view::npos || !read_number(word.substr(0, arrow), one.event) ||
        !read_number(word.substr(arrow + 1), one.rank) ||
        (!order.switches.empty() && order.switches.back().event >= one.event)) {
      throw Error(ErrorKind::kUsage, "testing",
                  "\"" + std::string(text) +
                      "\" is not an order of events: expected EVENT>RANK for each switch, with "
                      "ascending events, such as \"5>0 9>2\", or \"none\"");
    }
    order.switches.push_back(one);
  }
  return order;
}

int OrderedRun::next(int rank, const std::vector<int>& ready, const std::string& at) {
  const int64_t event = event_++;
  const auto can = [&](int r) { return std::binary_search(ready.begin(), ready.end(), r); };
  const auto higher = std::upper_bound(ready.begin(), ready.end(), rank);
  const int usual = can(rank) && !at.empty() ? rank : higher == ready.end() ? ready.front() : *higher;
  int chosen = usual;
  if (seed_) {
    const uint64_t draw = splitmix64(*seed_ ^ splitmix64(static_cast<uint64_t>(event)));
    if (static_cast<double>(draw >> 11) * 0x1p-53 < often_) chosen = ready[splitmix64(draw) % ready.size()];
  } else {
    while (used_ < given_.switches.size() && given_.switches[used_].event < event) ++used_;
    if (used_ < given_.switches.size() && given_.switches[used_].event == event && can(given_.switches[used_].rank)) {
      chosen = given_.switches[used_].rank;
    }
  }
  if (chosen != usual) {
    made_.switches.push_back({event, chosen});
    events_ += "  event " + std::to_string(event) + ": " +
               (rank < 0 ? "at the start"
                         : "rank " + std::to_string(rank) + (at.empty() ? " waits or ends" : " comes to " + at)) +
               "; rank " + std::to_string(chosen) + " goes on\n";
  }
  return chosen;
}

OrderSearch search_of_environment(int orders) {
  OrderSearch search;
  search.orders = orders;
  if (const char* const order = std::getenv("ANNULUS_TEST_ORDER"); order != nullptr) search.only = Order::parse(order);
  if (const char* const seed = std::getenv("ANNULUS_TEST_SEED"); seed != nullptr && !read_number(seed, search.seed)) {
    throw Error(ErrorKind::kUsage, "testing",
                std::string("ANNULUS_TEST_SEED is \"") + seed + "\": expected a whole number from 0 on");
  }
  return search;
}

std::optional<FailingOrder> find_failing_order(const std::function<std::string(RankOrder&)>& attempt,
                                               const OrderSearch& search) {
  const int orders = search.only ? 1 : search.orders;
  for (int i = 0; i < orders; ++i) {
    // Rare switches find what a single one at the right place does, many those that only a mixture does.
    const double often[] = {0.5, 0.1, 0.03};
    OrderedRun run = search.only ? OrderedRun(*search.only)
                     : i == 0    ? OrderedRun(Order())
                                 : OrderedRun(splitmix64(search.seed) + static_cast<uint64_t>(i), often[i % 3]);
    FailingOrder found = attempt_in(run, attempt);
    if (found.failure.empty()) continue;
    if (!search.only) found = shrunk(std::move(found), attempt);
    OrderedRun again(found.order);
    FailingOrder last = attempt_in(again, attempt);
    last.repeatable = !last.failure.empty();
    if (!last.repeatable) last = std::move(found), last.repeatable = false;
    last.tried = i + 1;
    return last;
  }
  return std::nullopt;
}

}  // namespace annulus::testing
