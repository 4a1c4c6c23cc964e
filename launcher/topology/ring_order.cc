// See ring_order.h.
#include "launcher/topology/ring_order.h"

#include <algorithm>
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

GpuGraph subgraph(const GpuGraph& gpus, const std::vector<int>& members) {
  GpuGraph out{Matrix(members.size(), std::vector<int64_t>(members.size()))};
  for (size_t i = 0; i < members.size(); ++i) {
    const auto from = static_cast<size_t>(members[i]);
    for (size_t j = 0; j < members.size(); ++j) {
      out.bandwidth[i][j] = gpus.bandwidth[from][members[j]];
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

// A position of an order, which lies in the piece that begins at `first`.
struct Position {
  size_t first = 0;
  bool returns = false;  // a link leads from it to the first, which closes the ring
  int ways = 0;          // connections to other hosts: two at a piece of a single member whose ring goes on elsewhere
};

std::vector<Position> positions_of(const RingPieces& pieces) {
  std::vector<Position> positions;
  for (const RingPiece& piece : pieces) {
    const size_t first = positions.size();
    for (int i = 0; i < piece.members; ++i) {
      const bool last = i + 1 == piece.members;
      positions.push_back({first, last && piece.closed && i > 0, piece.closed ? 0 : (i == 0) + last});
    }
  }
  return positions;
}

// Adds to the worth of an order what the member at a position contributes: the link from the one before it, the link
// back to the first, and its nearness to the network.
RingWorth with(RingWorth worth, const GpuGraph& gpus, const std::vector<int>& order, size_t at,
               const Position& position) {
  const auto add = [&](int to) {
    const int64_t link = gpus.bandwidth[order[at]][to];
    worth.slowest = std::min(worth.slowest, link);
    worth.sum += link;
  };
  if (at > position.first) add(order[at - 1]);
  if (position.returns) add(order[position.first]);
  if (!gpus.nearness.empty()) worth.ends += position.ways * gpus.nearness[order[at]];
  return worth;
}

constexpr RingWorth kNoLinks{std::numeric_limits<int64_t>::max(), 0, 0};

// Tries all orders, beginning with 0, 1, 2, ..., but leaves out those that begin with members after which no order can
// be better than the best so far.
class ExactOrder {
 public:
  ExactOrder(const GpuGraph& gpus, const RingPieces& pieces)
      : gpus_(gpus), positions_(positions_of(pieces)), order_(positions_.size()) {
    for (const auto& row : gpus.bandwidth) fastest_ = std::max(fastest_, *std::max_element(row.begin(), row.end()));
    for (const int nearness : gpus.nearness) nearest_ = std::max(nearest_, nearness);
    std::iota(order_.begin(), order_.end(), 0);
    extend(0, kNoLinks);
  }
  const std::vector<int>& best() const { return best_; }

 private:
  // `order_` is settled before `at`, and in ascending order from there on.
  void extend(size_t at, const RingWorth& before) {
    if (at == order_.size()) {
      best_ = order_;
      best_worth_ = before;
      return;
    }
    const auto next = order_.begin() + at;
    for (auto chosen = next; chosen != order_.end(); ++chosen) {
      std::rotate(next, chosen, chosen + 1);
      const RingWorth now = with(before, gpus_, order_, at, positions_[at]);
      RingWorth at_most = now;
      for (size_t later = at + 1; later < order_.size(); ++later) {
        const Position& position = positions_[later];
        at_most.sum += ((later > position.first) + position.returns) * fastest_;
        at_most.ends += position.ways * nearest_;
      }
      if (best_.empty() || at_most > best_worth_) extend(at + 1, now);
      std::rotate(next, next + 1, chosen + 1);
    }
  }

  const GpuGraph& gpus_;
  const std::vector<Position> positions_;
  int64_t fastest_ = 0;
  int nearest_ = 0;
  std::vector<int> order_, best_;
  RingWorth best_worth_;
};

std::vector<int> greedy_order(const GpuGraph& gpus, size_t start) {
  const Matrix& w = gpus.bandwidth;
  std::vector<int> order{static_cast<int>(start)};
  std::vector<bool> used(w.size(), false);
  used[start] = true;
  while (order.size() < w.size()) {
    const auto& row = w[order.back()];
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
        const auto first = order.begin() + i;
        const auto last = order.begin() + j + 1;
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
  const std::vector<Position> positions = positions_of(pieces);
  RingWorth sum = kNoLinks;
  for (size_t at = 0; at < positions.size(); ++at) sum = with(sum, gpus, order, at, positions[at]);
  if (sum.slowest == kNoLinks.slowest) sum.slowest = 0;
  return sum;
}

std::vector<int> best_ring_order(const GpuGraph& gpus, const std::vector<int>& members, const RingPieces& pieces) {
  if (members.size() != static_cast<size_t>(total(pieces))) {
    throw Error(ErrorKind::kInternal, "topology",
                std::to_string(members.size()) + " GPUs were given for ring pieces with a total of " +
                    std::to_string(total(pieces)));
  }
  if (members.size() < 2 || (members.size() == 2 && pieces.size() == 1)) return members;
  const GpuGraph w = subgraph(gpus, members);
  std::vector<int> order = members.size() <= kExact ? ExactOrder(w, pieces).best() : heuristic_order(w, pieces);
  for (int& i : order) i = members[i];
  return order;
}

std::vector<int> best_members(const GpuGraph& gpus, const RingPieces& pieces) {
  const Matrix& bandwidth = gpus.bandwidth;
  const size_t n = bandwidth.size();
  const auto want = static_cast<size_t>(total(pieces));
  std::vector<int> all(n);
  std::iota(all.begin(), all.end(), 0);
  if (want >= n || want == 0) return {all.begin(), all.begin() + std::min(want, n)};

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
    std::fill(chosen.begin(), chosen.begin() + want, true);
    do {  // beginning with {0, 1, ..}, in lexicographic order of the members
      std::vector<int> members;
      for (size_t i = 0; i < n; ++i) {
        if (chosen[i]) members.push_back(static_cast<int>(i));
      }
      consider(std::move(members));
    } while (std::prev_permutation(chosen.begin(), chosen.end()));
    return best;
  }
  consider({all.begin(), all.begin() + want});
  for (size_t s = 0; s < std::min(n, kStarts); ++s) {
    // Add the GPU with the fastest link to any member so far: the ring will need just those links.
    std::vector<int> members{static_cast<int>(s * n / std::min(n, kStarts))};
    std::vector<bool> used(n, false);
    used[members[0]] = true;
    while (members.size() < want) {
      size_t next = n;
      RingWorth next_worth;
      for (size_t i = 0; i < n; ++i) {
        if (used[i]) continue;
        RingWorth now;
        for (int m : members) {
          now.slowest = std::max(now.slowest, bandwidth[i][m]);
          now.sum += bandwidth[i][m];
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
