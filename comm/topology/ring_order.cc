// See ring_order.h.
#include "comm/topology/ring_order.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

namespace annulus {
namespace {

using Matrix = std::vector<std::vector<int64_t>>;

constexpr size_t kExact = 9;
constexpr size_t kTwoOpt = 32;  // 2-opt weighs members^2 changes in members steps each; no host has more GPUs
constexpr size_t kStarts = 4;
constexpr int64_t kNever = std::numeric_limits<int64_t>::min() / 4;

Matrix submatrix(const Matrix& bandwidth, const std::vector<int>& members) {
  Matrix out(members.size(), std::vector<int64_t>(members.size()));
  for (size_t i = 0; i < members.size(); ++i) {
    for (size_t j = 0; j < members.size(); ++j) {
      out[i][j] = bandwidth[static_cast<size_t>(members[i])][static_cast<size_t>(members[j])];
    }
  }
  return out;
}

// Held-Karp from the end: rest[mask][last] is the best that can still be had when `mask` is visited and `last` was the
// latest. Going forward, the lowest next index that keeps the best gives the order nearest to 0, 1, 2, ...
// `join` adds a link to what follows it: the sum, or the minimum.
template <typename Join>
std::pair<int64_t, std::vector<int>> held_karp(const Matrix& w, bool closed, int64_t nothing, Join join) {
  const size_t n = w.size();
  const size_t full = (size_t{1} << n) - 1;
  std::vector<std::vector<int64_t>> rest(full + 1, std::vector<int64_t>(n, kNever));
  for (size_t last = 0; last < n; ++last) rest[full][last] = closed ? join(w[last][0], nothing) : nothing;
  for (size_t mask = full; mask-- > 1;) {
    for (size_t last = 0; last < n; ++last) {
      if (!(mask >> last & 1)) continue;
      for (size_t next = 0; next < n; ++next) {
        if (mask >> next & 1) continue;
        rest[mask][last] = std::max(rest[mask][last], join(w[last][next], rest[mask | size_t{1} << next][next]));
      }
    }
  }
  size_t start = 0;
  if (!closed) {
    for (size_t s = 1; s < n; ++s) {
      if (rest[size_t{1} << s][s] > rest[size_t{1} << start][start]) start = s;
    }
  }
  std::vector<int> order{static_cast<int>(start)};
  size_t mask = size_t{1} << start;
  const int64_t best = rest[mask][start];
  for (size_t last = start; mask != full;) {
    for (size_t next = 0; next < n; ++next) {
      if (mask >> next & 1) continue;
      if (join(w[last][next], rest[mask | size_t{1} << next][next]) == rest[mask][last]) {
        mask |= size_t{1} << next;
        order.push_back(static_cast<int>(next));
        last = next;
        break;
      }
    }
  }
  return {best, order};
}

std::vector<int> exact_order(Matrix w, bool closed) {
  // The sum may only use links as fast as the slowest of the best ring: then every such ring has the best slowest link.
  const int64_t slowest = held_karp(w, closed, std::numeric_limits<int64_t>::max(), [](int64_t link, int64_t after) {
                            return std::min(link, after);
                          }).first;
  for (auto& row : w) {
    for (int64_t& value : row) {
      if (value < slowest) value = kNever;
    }
  }
  return held_karp(
             w, closed, 0,
             [](int64_t link, int64_t after) { return link == kNever || after == kNever ? kNever : link + after; })
      .second;
}

std::vector<int> greedy_order(const Matrix& w, size_t start) {
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

void two_opt(const Matrix& w, std::vector<int>& order, bool closed) {
  RingWorth worth = ring_worth(w, order, closed);
  // Each round makes the order worth more, so it ends; the bound keeps an odd matrix from taking long.
  for (size_t round = 0; round < order.size(); ++round) {
    bool better = false;
    for (size_t i = closed ? 1 : 0; i + 1 < order.size(); ++i) {
      for (size_t j = i + 1; j < order.size(); ++j) {
        const auto first = order.begin() + static_cast<std::ptrdiff_t>(i);
        const auto last = order.begin() + static_cast<std::ptrdiff_t>(j) + 1;
        std::reverse(first, last);
        const RingWorth now = ring_worth(w, order, closed);
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

std::vector<int> heuristic_order(const Matrix& w, bool closed) {
  std::vector<int> best(w.size());
  std::iota(best.begin(), best.end(), 0);
  const bool improve = w.size() <= kTwoOpt;
  if (improve) two_opt(w, best, closed);
  RingWorth worth = ring_worth(w, best, closed);
  for (size_t s = 0; s < std::min(w.size(), kStarts); ++s) {
    std::vector<int> order = greedy_order(w, s * w.size() / std::min(w.size(), kStarts));
    if (improve) two_opt(w, order, closed);
    const RingWorth now = ring_worth(w, order, closed);
    if (now > worth) {
      worth = now;
      best = std::move(order);
    }
  }
  if (closed) std::rotate(best.begin(), std::find(best.begin(), best.end(), 0), best.end());
  return best;
}

}  // namespace

RingWorth ring_worth(const Matrix& bandwidth, const std::vector<int>& order, bool closed) {
  if (order.size() < 2) return {};
  RingWorth worth{std::numeric_limits<int64_t>::max(), 0};
  for (size_t i = 0; i + (closed ? 0 : 1) < order.size(); ++i) {
    const int64_t link = bandwidth[static_cast<size_t>(order[i])][static_cast<size_t>(order[(i + 1) % order.size()])];
    worth.slowest = std::min(worth.slowest, link);
    worth.sum += link;
  }
  return worth;
}

std::vector<int> best_ring_order(const Matrix& bandwidth, const std::vector<int>& members, bool closed) {
  if (members.size() < 3) return members;
  const Matrix w = submatrix(bandwidth, members);
  std::vector<int> order = members.size() <= kExact ? exact_order(w, closed) : heuristic_order(w, closed);
  for (int& i : order) i = members[static_cast<size_t>(i)];
  return order;
}

std::vector<int> best_members(const Matrix& bandwidth, int count, bool closed) {
  const size_t n = bandwidth.size();
  const auto want = static_cast<size_t>(count);
  std::vector<int> all(n);
  std::iota(all.begin(), all.end(), 0);
  if (want >= n || want == 0) return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(want, n))};

  std::vector<int> best;
  RingWorth worth;
  const auto consider = [&](std::vector<int> members) {
    const RingWorth now = ring_worth(bandwidth, best_ring_order(bandwidth, members, closed), closed);
    if (best.empty() || now > worth) {
      worth = now;
      best = std::move(members);
    }
  };
  if (n <= kExact) {
    std::vector<bool> chosen(n, false);
    std::fill(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(want), true);
    do {  // from {0, 1, ..} on, in lexicographic order of the members
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
    // Grow by whoever is best connected to its closest members: the ring will need just those links.
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
