// See ring_order.h.
#include "launcher/topology/ring_order.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "common/error.h"

namespace annulus {
namespace {

using Matrix = std::vector<std::vector<int64_t>>;

constexpr size_t kExact = 9;
constexpr size_t kTwoOpt = 32;  // 2-opt tries members^2 changes, each in members steps; hosts have fewer GPUs
constexpr size_t kStarts = 4;
constexpr int64_t kLinkShare = 256;  // exceeds the nearness of all ends together: 9 pieces * 2 ends * 7 = 126
constexpr int64_t kNever = std::numeric_limits<int64_t>::min() / 4;

GpuGraph subgraph(const GpuGraph& gpus, const std::vector<int>& members) {
  GpuGraph out{Matrix(members.size(), std::vector<int64_t>(members.size()))};
  for (size_t i = 0; i < members.size(); ++i) {
    const auto from = static_cast<size_t>(members[i]);
    for (size_t j = 0; j < members.size(); ++j) {
      out.bandwidth[i][j] = gpus.bandwidth[from][static_cast<size_t>(members[j])];
    }
    out.nearness.push_back(gpus.nearness.empty() ? 0 : gpus.nearness[from]);
  }
  return out;
}

int total(const RingPieces& pieces) {
  int sum = 0;
  for (const RingPiece& piece : pieces) sum += piece.members;
  return sum;
}

// What follows the member at each position of an order.
enum class After {
  kNext,    // a link to the next
  kReturn,  // a link to the first of its piece, which ends here
  kNone     // no link: the piece ends here and goes on elsewhere, or has one member
};

std::vector<After> links_of(const RingPieces& pieces) {
  std::vector<After> after;
  for (const RingPiece& piece : pieces) {
    for (int i = 0; i + 1 < piece.members; ++i) after.push_back(After::kNext);
    if (piece.members > 0) after.push_back(piece.closed && piece.members > 1 ? After::kReturn : After::kNone);
  }
  return after;
}

// Returns how many connections to other hosts begin or end at each position of an order: two at a piece of a single
// member whose ring continues elsewhere.
std::vector<int> ways_out(const RingPieces& pieces) {
  std::vector<int> ways(static_cast<size_t>(total(pieces)), 0);
  size_t begin = 0;
  for (const RingPiece& piece : pieces) {
    const size_t end = begin + static_cast<size_t>(piece.members);
    if (!piece.closed && piece.members > 0) {
      ++ways[begin];
      ++ways[end - 1];
    }
    begin = end;
  }
  return ways;
}

// Held-Karp, computed from the end: rest[mask][last][first] is the best worth of the remaining order when the members
// in `mask` are visited, `last` was visited last, and its piece begins with `first`. Going forward, always taking the
// lowest next index that keeps the best worth gives the order nearest to 0, 1, 2, ... `join` combines a link with the
// worth of what follows it: their sum or their minimum. `at_place(position, member)` is added for every member.
template <typename Join, typename AtPlace>
class HeldKarp {
 public:
  HeldKarp(const Matrix& w, const std::vector<After>& after, int64_t nothing, Join join, AtPlace at_place)
      : w_(w),
        after_(after),
        nothing_(nothing),
        join_(join),
        at_place_(at_place),
        n_(w.size()),
        rest_(n_ * n_ << n_, kNever) {
    for (size_t mask = full(); mask > 0; --mask) {
      for (size_t last = 0; last < n_; ++last) {
        for (size_t first = 0; first < n_ && (mask >> last & 1); ++first) {
          if (mask >> first & 1) at(mask, last, first) = solve(mask, last, first);
        }
      }
    }
  }

  std::pair<int64_t, std::vector<int>> best() {
    const auto from = [&](size_t s) { return at(size_t{1} << s, s, s) + at_place_(0, s); };
    size_t start = 0;
    for (size_t s = 1; s < n_; ++s) {
      if (from(s) > from(start)) start = s;
    }
    std::vector<int> order{static_cast<int>(start)};
    size_t mask = size_t{1} << start;
    const int64_t best = from(start);
    for (size_t last = start, first = start; mask != full();) {
      for (size_t next = 0; next < n_; ++next) {
        if ((mask >> next & 1) || with(mask, last, first, next) != at(mask, last, first)) continue;
        first = ends(mask) ? next : first;
        mask |= size_t{1} << next;
        order.push_back(static_cast<int>(next));
        last = next;
        break;
      }
    }
    return {best, order};
  }

 private:
  size_t full() const { return (size_t{1} << n_) - 1; }
  int64_t& at(size_t mask, size_t last, size_t first) { return rest_[(mask * n_ + last) * n_ + first]; }
  After after(size_t mask) const { return after_[static_cast<size_t>(std::popcount(mask)) - 1]; }
  bool ends(size_t mask) const { return after(mask) != After::kNext; }

  int64_t with(size_t mask, size_t last, size_t first, size_t next) {
    int64_t then = at(mask | size_t{1} << next, next, ends(mask) ? next : first);
    if (then != kNever) then += at_place_(static_cast<size_t>(std::popcount(mask)), next);
    if (after(mask) == After::kNone) return then;
    return join_(w_[last][after(mask) == After::kNext ? next : first], then);
  }

  int64_t solve(size_t mask, size_t last, size_t first) {
    if (mask == full()) return after(mask) == After::kReturn ? join_(w_[last][first], nothing_) : nothing_;
    int64_t best = kNever;
    for (size_t next = 0; next < n_; ++next) {
      if (!(mask >> next & 1)) best = std::max(best, with(mask, last, first, next));
    }
    return best;
  }

  const Matrix& w_;
  const std::vector<After>& after_;
  const int64_t nothing_;
  const Join join_;
  const AtPlace at_place_;
  const size_t n_;
  std::vector<int64_t> rest_;
};

std::vector<int> exact_order(GpuGraph gpus, const RingPieces& pieces) {
  const std::vector<After> after = links_of(pieces);
  // The first pass finds the best possible slowest link. The second maximizes the sum over links that are at least that
  // fast, so its result also has the best slowest link.
  const int64_t slowest =
      HeldKarp(
          gpus.bandwidth, after, std::numeric_limits<int64_t>::max(),
          [](int64_t link, int64_t then) { return std::min(link, then); }, [](size_t, size_t) { return int64_t{0}; })
          .best()
          .first;
  // Any difference in the sum of links outweighs all nearness to the network.
  for (auto& row : gpus.bandwidth) {
    for (int64_t& value : row) value = value < slowest ? kNever : value * kLinkShare;
  }
  const std::vector<int> ways = ways_out(pieces);
  return HeldKarp(
             gpus.bandwidth, after, 0,
             [](int64_t link, int64_t then) { return link == kNever || then == kNever ? kNever : link + then; },
             [&](size_t position, size_t member) { return int64_t{ways[position]} * gpus.nearness[member]; })
      .best()
      .second;
}

std::vector<int> greedy_order(const GpuGraph& gpus, size_t start) {
  const Matrix& w = gpus.bandwidth;
  std::vector<int> order{static_cast<int>(start)};
  std::vector<bool> used(w.size(), false);
  used[start] = true;
  while (order.size() < w.size()) {
    const auto& row = w[static_cast<size_t>(order.back())];
    size_t best = w.size();
    for (size_t i = 0; i < w.size(); ++i) {
      if (!used[i] && (best == w.size() || row[i] > row[best])) best = i;
    }
    used[best] = true;
    order.push_back(static_cast<int>(best));
  }
  return order;
}

bool one_ring(const RingPieces& pieces) { return pieces.size() == 1 && pieces.front().closed; }

void two_opt(const GpuGraph& w, std::vector<int>& order, const RingPieces& pieces) {
  RingWorth worth = ring_worth(w, order, pieces);
  // Each round improves the order, so the loop ends; the bound limits the time that an unusual matrix can take.
  for (size_t round = 0; round < order.size(); ++round) {
    bool better = false;
    for (size_t i = one_ring(pieces) ? 1 : 0; i + 1 < order.size(); ++i) {
      for (size_t j = i + 1; j < order.size(); ++j) {
        const auto first = order.begin() + static_cast<std::ptrdiff_t>(i);
        const auto last = order.begin() + static_cast<std::ptrdiff_t>(j) + 1;
        std::reverse(first, last);
        const RingWorth now = ring_worth(w, order, pieces);
        if (now > worth) {
          worth = now;
          better = true;
        } else {
          std::reverse(first, last);
        }
      }
    }
    if (!better) return;
  }
}

std::vector<int> heuristic_order(const GpuGraph& w, const RingPieces& pieces) {
  const size_t n = w.bandwidth.size();
  std::vector<int> best(n);
  std::iota(best.begin(), best.end(), 0);
  const bool improve = n <= kTwoOpt;
  if (improve) two_opt(w, best, pieces);
  RingWorth worth = ring_worth(w, best, pieces);
  for (size_t s = 0; s < std::min(n, kStarts); ++s) {
    std::vector<int> order = greedy_order(w, s * n / std::min(n, kStarts));
    if (improve) two_opt(w, order, pieces);
    const RingWorth now = ring_worth(w, order, pieces);
    if (now > worth) {
      worth = now;
      best = std::move(order);
    }
  }
  if (one_ring(pieces)) std::rotate(best.begin(), std::find(best.begin(), best.end(), 0), best.end());
  return best;
}

}  // namespace

RingWorth ring_worth(const GpuGraph& gpus, const std::vector<int>& order, const RingPieces& pieces) {
  RingWorth worth{std::numeric_limits<int64_t>::max(), 0, 0};
  const std::vector<int> ways = ways_out(pieces);
  bool any = false;
  const std::vector<After> after = links_of(pieces);
  for (size_t i = 0, first = 0; i < after.size(); ++i) {
    if (after[i] != After::kNone) {
      const size_t to = after[i] == After::kNext ? i + 1 : first;
      const int64_t link = gpus.bandwidth[static_cast<size_t>(order[i])][static_cast<size_t>(order[to])];
      worth.slowest = std::min(worth.slowest, link);
      worth.sum += link;
      any = true;
    }
    if (after[i] != After::kNext) first = i + 1;
    if (!gpus.nearness.empty()) worth.ends += ways[i] * gpus.nearness[static_cast<size_t>(order[i])];
  }
  if (!any) worth.slowest = 0;
  return worth;
}

std::vector<int> best_ring_order(const GpuGraph& gpus, const std::vector<int>& members, const RingPieces& pieces) {
  if (members.size() != static_cast<size_t>(total(pieces))) {
    throw Error(ErrorKind::kInternal, "topology",
                std::to_string(members.size()) + " GPUs were given for ring pieces with a total of " +
                    std::to_string(total(pieces)));
  }
  if (members.size() < 2 || (members.size() == 2 && pieces.size() == 1)) return members;
  const GpuGraph w = subgraph(gpus, members);
  std::vector<int> order = members.size() <= kExact ? exact_order(w, pieces) : heuristic_order(w, pieces);
  for (int& i : order) i = members[static_cast<size_t>(i)];
  return order;
}

std::vector<int> best_members(const GpuGraph& gpus, const RingPieces& pieces) {
  const Matrix& bandwidth = gpus.bandwidth;
  const size_t n = bandwidth.size();
  const auto want = static_cast<size_t>(total(pieces));
  std::vector<int> all(n);
  std::iota(all.begin(), all.end(), 0);
  if (want >= n || want == 0) return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(want, n))};

  std::vector<int> best;
  RingWorth worth;
  const auto consider = [&](std::vector<int> members) {
    const RingWorth now = ring_worth(gpus, best_ring_order(gpus, members, pieces), pieces);
    if (best.empty() || now > worth) {
      worth = now;
      best = std::move(members);
    }
  };
  if (n <= kExact) {
    std::vector<bool> chosen(n, false);
    std::fill(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(want), true);
    do {  // beginning with {0, 1, ..}, in lexicographic order of the members
      std::vector<int> members;
      for (size_t i = 0; i < n; ++i) {
        if (chosen[i]) members.push_back(static_cast<int>(i));
      }
      consider(std::move(members));
    } while (std::prev_permutation(chosen.begin(), chosen.end()));
    return best;
  }
  consider({all.begin(), all.begin() + static_cast<std::ptrdiff_t>(want)});
  for (size_t s = 0; s < std::min(n, kStarts); ++s) {
    // Add the GPU with the fastest link to any member so far: the ring will need just those links.
    std::vector<int> members{static_cast<int>(s * n / std::min(n, kStarts))};
    std::vector<bool> used(n, false);
    used[static_cast<size_t>(members[0])] = true;
    while (members.size() < want) {
      size_t next = n;
      RingWorth next_worth;
      for (size_t i = 0; i < n; ++i) {
        if (used[i]) continue;
        RingWorth now;
        for (int m : members) {
          now.slowest = std::max(now.slowest, bandwidth[i][static_cast<size_t>(m)]);
          now.sum += bandwidth[i][static_cast<size_t>(m)];
        }
        if (next == n || now > next_worth) {
          next = i;
          next_worth = now;
        }
      }
      used[next] = true;
      members.push_back(static_cast<int>(next));
    }
    std::sort(members.begin(), members.end());
    consider(std::move(members));
  }
  return best;
}

}  // namespace annulus
