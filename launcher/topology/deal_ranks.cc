// How many ranks each host gets, and in which order the hosts come. See placement.h.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/text.h"
#include "launcher/topology/placement.h"

namespace annulus {
namespace {

// Deals `ranks` out over hosts with `room` as evenly as possible; the first hosts get the remainder.
std::vector<int> even_shares(const std::vector<int>& room, int ranks) {
  std::vector<int> counts(room.size(), 0);
  for (int left = ranks; left > 0;) {
    int open = 0;
    for (size_t h = 0; h < room.size(); ++h) open += counts[h] < room[h] ? 1 : 0;
    const int base = std::max(1, left / open);
    for (size_t h = 0; h < room.size() && left > 0; ++h) {
      const int more = std::min({base, room[h] - counts[h], left});
      counts[h] += more;
      left -= more;
    }
  }
  return counts;
}

// Returns `room` with 0 for the hosts that `ranks` ranks do not need: the ones with the least room.
std::vector<int> fewest_hosts(std::vector<int> room, int ranks) {
  std::vector<size_t> order(room.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return room[a] > room[b]; });
  int64_t sum = 0;
  for (size_t h : order) {
    if (sum >= ranks) room[h] = 0;
    sum += room[h];
  }
  return room;
}

// Counts the hops between hosts in all rings together: a ring on several hosts has one for each of them.
int crossings(const std::vector<int>& ranks_per_host, const std::vector<size_t>& order, int context) {
  int64_t before = 0;
  int count = 0;
  bool cut = false;  // whether the current, incomplete ring already crosses a boundary between hosts
  for (size_t h : order) {
    if (ranks_per_host[h] == 0) continue;
    const int64_t after = before + ranks_per_host[h];
    if (before % context != 0) {
      count += cut ? 1 : 2;
      cut = after / context == before / context;
    }
    before = after;
  }
  return count;
}

}  // namespace

std::vector<int> deal_ranks(const std::vector<int>& room, int ranks, int context) {
  const int64_t all = std::accumulate(room.begin(), room.end(), int64_t{0});
  if (ranks < 1 || ranks > all) {
    throw Error(ErrorKind::kPlan, "topology",
                counted(ranks, "rank") + " cannot be dealt out to " + counted(room.size(), "host") + " with room for " +
                    std::to_string(all));
  }
  if (context < 1) return even_shares(room, ranks);
  std::vector<int> whole;  // number of whole rings that fit on each host
  for (int r : room) whole.push_back(r / context);
  const int64_t fit = std::accumulate(whole.begin(), whole.end(), int64_t{0});
  std::vector<int> counts = even_shares(whole, static_cast<int>(std::min<int64_t>(fit, ranks / context)));
  std::vector<int> left;
  for (size_t h = 0; h < room.size(); ++h) {
    counts[h] *= context;
    left.push_back(room[h] - counts[h]);
  }
  const int rest = ranks - std::accumulate(counts.begin(), counts.end(), 0);
  const std::vector<int> more = even_shares(fewest_hosts(left, rest), rest);
  for (size_t h = 0; h < room.size(); ++h) counts[h] += more[h];
  return counts;
}

std::vector<size_t> order_hosts(const std::vector<int>& ranks_per_host, int context) {
  std::vector<size_t> own(ranks_per_host.size());
  std::iota(own.begin(), own.end(), size_t{0});
  if (context < 2 || crossings(ranks_per_host, own, context) == 0) return own;
  // While a ring is incomplete, the next host is the one that leaves the least of it to others, and of several such
  // hosts the one with the fewest ranks.
  std::vector<size_t> left = own, order;
  for (int open = 0; !left.empty();) {
    const auto rest = [&](size_t h) { return (open + ranks_per_host[h]) % context; };
    const auto missing = [&](size_t h) {
      return open == 0 ? std::pair(0, 0) : std::pair((context - rest(h)) % context, ranks_per_host[h]);
    };
    const auto next =
        std::min_element(left.begin(), left.end(), [&](size_t a, size_t b) { return missing(a) < missing(b); });
    order.push_back(*next);
    open = rest(*next);
    left.erase(next);
  }
  return crossings(ranks_per_host, order, context) < crossings(ranks_per_host, own, context) ? order : own;
}

}  // namespace annulus
