// Deals parts that need nothing of each other; see part_dealer.h.
#include "attention/plan/part_dealer.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>

namespace annulus {
namespace {

constexpr double kMostCut = 1.049;   // of the mean work, that a rank takes while parts are cut
constexpr double kRestOfCut = 1.03;  // of the mean work, that those which follow may have to take on average

// What is left of a part: [begin, end) of what began at `base`.
struct Left {
  int64_t base = 0, begin = 0, end = 0;

  int64_t tokens() const { return end - begin; }
  int64_t reach() const { return end - base; }  // keys that its last query needs
};

class PartDealer {
 public:
  PartDealer(const std::vector<int64_t>& before, const Stretches& parts, int ranks)
      : before_(before),
        parts_(parts),
        ranks_(ranks),
        mean_(std::max(1e-9, static_cast<double>(before.back()) / ranks)) {}

  // Deals rank after rank: the longest part whole where it fits, or its end.
  std::vector<Stretches> in_turn() {
    begin();
    for (int r = 0; r + 1 < ranks_; ++r) {
      const double needed = rest_ - (ranks_ - 1 - r) * mean_ * kRestOfCut;
      int64_t tokens = share(r);
      double used = 0;
      while (tokens > 0 && !left_.empty()) {
        Left& longest = left_.front();
        if (longest.tokens() <= tokens && used + work(longest) <= mean_ * kMostCut) {
          take(r, 0, longest.tokens(), tokens, used);
        } else if (used == 0 || !fill(r, needed, tokens, used)) {
          cut(r, 0, tokens, used);
        }
        drop_empty();
      }
      rest_ -= used;
    }
    for (const Left& part : left_) append(dealt_.back(), {part.begin, part.end});
    return std::move(dealt_);
  }

  // Cuts parts that have more than `whole` of the mean work, or more tokens than a rank, until there are none, and
  // packs the rest whole into the ranks that are left, up to `most` of the mean work for each where this comes out
  // even.
  std::vector<Stretches> packed(double whole, double most) {
    begin();
    int r = 0;
    for (; r + 1 < ranks_; ++r) {
      int64_t tokens = share(r);
      double used = 0;
      bool any = false;
      while (tokens > 0 && !left_.empty()) {
        const auto large = std::ranges::find_if(
            left_, [&](const Left& part) { return part.tokens() > share(r) || work(part) > whole * mean_; });
        if (large == left_.end() && !any) break;
        cut(r, large == left_.end() ? 0 : static_cast<size_t>(large - left_.begin()), tokens, used);
        any = true;
        drop_empty();
      }
      if (!any) break;
      rest_ -= used;
    }
    pack(r, most);
    return std::move(dealt_);
  }

 private:
  void begin() {
    left_.clear();
    for (const Stretch& part : parts_) left_.push_back({part.begin, part.begin, part.end});
    std::ranges::stable_sort(left_, [](const Left& a, const Left& b) { return a.reach() > b.reach(); });
    dealt_.assign(static_cast<size_t>(ranks_), {});
    rest_ = static_cast<double>(before_.back());
  }

  int64_t share(int rank) const {
    const auto length = static_cast<__int128>(before_.size() - 1);
    return static_cast<int64_t>((rank + 1) * length / ranks_) - static_cast<int64_t>(rank * length / ranks_);
  }
  double work(int64_t begin, int64_t end) const {
    return static_cast<double>(before_[static_cast<size_t>(end)] - before_[static_cast<size_t>(begin)]);
  }
  double work(const Left& part) const { return work(part.begin, part.end); }

  void drop_empty() {
    std::erase_if(left_, [](const Left& part) { return part.tokens() == 0; });
  }

  // Takes the first `count` tokens of what is left of a part.
  void take(int rank, size_t which, int64_t count, int64_t& tokens, double& used) {
    Left& part = left_[which];
    append(dealt_[static_cast<size_t>(rank)], {part.begin, part.begin + count});
    used += work(part.begin, part.begin + count);
    part.begin += count;
    tokens -= count;
  }

  // Fills a rank with the longest whole parts that fit and the beginning of another, unless it would have less work
  // than is needed.
  bool fill(int rank, double needed, int64_t& tokens, double& used) {
    std::vector<size_t> whole;
    int64_t free = tokens;
    double sum = used;
    for (size_t i = 0; i < left_.size() && free > 0; ++i) {
      if (left_[i].tokens() > free || sum + work(left_[i]) > mean_ * kMostCut) continue;
      whole.push_back(i);
      free -= left_[i].tokens();
      sum += work(left_[i]);
    }
    if (sum < needed) return false;
    for (const size_t i : whole) take(rank, i, left_[i].tokens(), tokens, used);
    while (tokens > 0) {
      // A beginning costs the keys before its end.
      const Left* best = nullptr;
      for (const Left& part : left_) {
        if (part.tokens() == 0) continue;
        const bool ends = part.tokens() > tokens, best_ends = best != nullptr && best->tokens() > tokens;
        if (best == nullptr || (ends && !best_ends) ||
            (ends == best_ends && part.begin - part.base < best->begin - best->base)) {
          best = &part;
        }
      }
      if (best == nullptr) break;
      take(rank, static_cast<size_t>(best - left_.data()), std::min(tokens, best->tokens()), tokens, used);
    }
    return true;
  }

  // How a rank is filled around the end of a part.
  struct Cut {
    int64_t ending = -1, beginning = 0;  // tokens of the part
    size_t whole = 0;                    // that many of the shortest other parts
    int64_t piece = 0;                   // tokens of the next shortest
    double worth = -std::numeric_limits<double>::infinity();
  };

  // Gives a rank the end of a part and what it is filled up with, or, where not one token of it fits, the next piece of
  // the shortest part.
  void cut(int rank, size_t which, int64_t& tokens, double& used) {
    const Cut best = best_cut(which, tokens, mean_ * kMostCut - used);
    if (best.ending < 0) {
      take(rank, left_.size() - 1, std::min(tokens, left_.back().tokens()), tokens, used);
      return;
    }
    size_t next = left_.size();
    const auto shortest = [&] {
      do --next;
      while (next == which);
      return next;
    };
    for (size_t i = 0; i < best.whole; ++i) {
      const size_t part = shortest();
      take(rank, part, left_[part].tokens(), tokens, used);
    }
    if (best.piece > 0) take(rank, shortest(), best.piece, tokens, used);
    take(rank, which, best.beginning, tokens, used);
    Left& part = left_[which];
    append(dealt_[static_cast<size_t>(rank)], {part.end - best.ending, part.end});
    used += work(part.end - best.ending, part.end);
    part.end -= best.ending;
    tokens -= best.ending;
    for (size_t i = which; i + 1 < left_.size() && left_[i].reach() < left_[i + 1].reach(); ++i) {
      std::swap(left_[i], left_[i + 1]);
    }
  }

  // Each token that a rank takes from the end is one less that all ranks need which take the rest of the part.
  Cut best_cut(size_t which, int64_t tokens, double most) const {
    const Left& part = left_[which];
    const double later = std::max(1.0, static_cast<double>(static_cast<int64_t>(work(part) / std::max(1.0, most))));
    Cut best;
    int64_t taken = 0;
    double used = 0;
    size_t next = left_.size();
    for (size_t whole = 0;; ++whole) {
      const int64_t free = tokens - taken;
      if (free < 0 || used > most) break;
      // The most tokens of the end whose work fits with that of the others, which are taken from `from` on; less than
      // `at_least` if so many do not fit.
      const auto longest_end = [&](int64_t from, int64_t at_least, int64_t at_most) {
        int64_t low = at_least - 1, high = at_most;
        while (low < high) {
          const int64_t ending = low + (high - low + 1) / 2;
          const bool fits = used + work(part.end - ending, part.end) + work(from, from + free - ending) <= most;
          (fits ? low : high) = fits ? ending : ending - 1;
        }
        return low;
      };
      const auto offer = [&](int64_t ending, int64_t beginning, int64_t piece, int64_t rows) {
        const double worth = later * static_cast<double>(ending) - static_cast<double>(rows);
        if (worth > best.worth) best = {ending, beginning, whole, piece, worth};
      };
      if (free < part.tokens()) {
        if (const int64_t ending = longest_end(part.begin, 0, free); ending >= 0) offer(ending, free - ending, 0, 0);
      }
      do {
        if (next == 0) return best;
        --next;
      } while (next == which);
      const Left& filler = left_[next];
      const int64_t least = std::max<int64_t>(0, free - filler.tokens() + 1);
      if (const int64_t ending = longest_end(filler.begin, least, std::min(free, part.tokens() - 1)); ending >= least) {
        const int64_t piece = free - ending;
        offer(ending, 0, piece, piece == 0 ? 0 : filler.begin - filler.base + piece);
      }
      taken += filler.tokens();
      used += work(filler);
    }
    return best;
  }

  struct Item {
    Left part;
    double work = 0;
  };

  // What a rank that parts are packed into has.
  struct Bin {
    int64_t share = 0, tokens = 0;
    double work = 0;
    std::vector<size_t> items;
  };

  // Rows that moving tokens to or from it will cost, and what lets work that is too much outweigh them.
  double excess(const Bin& bin, double most) const { return excess(bin, bin.tokens, bin.work, most); }
  double excess(const Bin& bin, int64_t tokens, double work, double most) const {
    constexpr double kWork = 20;
    const double rows = static_cast<double>(std::abs(tokens - bin.share));
    return work <= most ? rows : rows + 1 + kWork * (work - most) / mean_ * static_cast<double>(bin.share);
  }

  void pack(int first, double most_of_mean) {
    const double most = most_of_mean * mean_;
    std::vector<Item> items;
    for (const Left& part : left_) items.push_back({part, work(part)});
    std::vector<Bin> bins(static_cast<size_t>(ranks_ - first));
    for (size_t b = 0; b < bins.size(); ++b) bins[b].share = std::max<int64_t>(1, share(first + static_cast<int>(b)));
    place(items, bins, most_of_mean);
    exchange(items, bins, most);
    level(items, bins, first);
  }

  // The largest first, each to the bin in which the sum of squares of tokens and work rises least.
  void place(std::vector<Item>& items, std::vector<Bin>& bins, double most) const {
    const auto size = [&](const Item& item) {
      return std::max(item.work / mean_, static_cast<double>(item.part.tokens()) / static_cast<double>(bins[0].share));
    };
    std::ranges::stable_sort(items, [&](const Item& a, const Item& b) { return size(a) > size(b); });
    for (size_t i = 0; i < items.size(); ++i) {
      const auto tokens = static_cast<double>(items[i].part.tokens()), work = items[i].work / mean_;
      Bin* best = nullptr;
      double least = std::numeric_limits<double>::infinity();
      for (Bin& bin : bins) {
        constexpr double kFull = 1000;
        const double t = static_cast<double>(bin.tokens) / static_cast<double>(bin.share), w = bin.work / mean_;
        const double more = tokens / static_cast<double>(bin.share), x = t + more, y = w + work;
        const double rise = x * x - t * t + y * y - w * w + kFull * (std::max(0.0, x - 1) + std::max(0.0, y - most));
        if (rise < least) least = rise, best = &bin;
      }
      best->items.push_back(i);
      best->tokens += items[i].part.tokens();
      best->work += items[i].work;
    }
  }

  // Moves and exchanges items between two bins as long as that lessens their excess.
  void exchange(const std::vector<Item>& items, std::vector<Bin>& bins, double most) const {
    constexpr int64_t kSteps = 300'000;
    constexpr size_t kPartners = 8;
    constexpr size_t kNone = std::numeric_limits<size_t>::max();
    int64_t steps = 0;
    std::vector<size_t> order(bins.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (bool moved = true; moved && steps < kSteps;) {
      moved = false;
      std::ranges::stable_sort(order,
                               [&](size_t a, size_t b) { return excess(bins[a], most) > excess(bins[b], most); });
      for (const size_t a : order) {
        if (steps >= kSteps) break;
        Bin& one = bins[a];
        if (excess(one, most) <= 0) continue;
        // The others that lack most of what this one has too much of.
        std::vector<std::pair<double, size_t>> partners;
        const double too_many = static_cast<double>(one.tokens - one.share) / static_cast<double>(one.share);
        const double too_much = one.work / mean_ - most / mean_;
        for (size_t b = 0; b < bins.size(); ++b) {
          if (b == a) continue;
          const double tokens =
              static_cast<double>(bins[b].share - bins[b].tokens) / static_cast<double>(bins[b].share);
          const double fit = too_much > 0 ? bins[b].work / mean_ : (too_many > 0 ? -tokens : tokens);
          partners.emplace_back(fit, b);
        }
        const size_t some = std::min(kPartners, partners.size());
        std::partial_sort(partners.begin(), partners.begin() + static_cast<std::ptrdiff_t>(some), partners.end());
        double best_gain = 1e-9;
        size_t best_i = kNone, best_j = kNone, best_b = kNone;
        for (size_t p = 0; p < some; ++p) {
          const Bin& other = bins[partners[p].second];
          const double now = excess(one, most) + excess(other, most);
          for (size_t x = 0; x <= one.items.size(); ++x) {
            const Item* const give = x < one.items.size() ? &items[one.items[x]] : nullptr;
            for (size_t y = 0; y <= other.items.size(); ++y) {
              const Item* const get = y < other.items.size() ? &items[other.items[y]] : nullptr;
              ++steps;
              const int64_t tokens = (get ? get->part.tokens() : 0) - (give ? give->part.tokens() : 0);
              const double work = (get ? get->work : 0) - (give ? give->work : 0);
              const double after = excess(one, one.tokens + tokens, one.work + work, most);
              if (after >= now) continue;
              const double gain = now - after - excess(other, other.tokens - tokens, other.work - work, most);
              if (gain > best_gain) {
                best_gain = gain, best_b = partners[p].second;
                best_i = give ? x : kNone, best_j = get ? y : kNone;
              }
            }
          }
        }
        if (best_b == kNone) continue;
        moved = true;
        Bin& other = bins[best_b];
        const auto move = [&](Bin& from, Bin& to, size_t item) {
          from.tokens -= items[item].part.tokens(), from.work -= items[item].work;
          to.tokens += items[item].part.tokens(), to.work += items[item].work;
          to.items.push_back(item);
        };
        const size_t given = best_i == kNone ? kNone : one.items[best_i];
        const size_t got = best_j == kNone ? kNone : other.items[best_j];
        if (given != kNone) one.items.erase(one.items.begin() + static_cast<std::ptrdiff_t>(best_i));
        if (got != kNone) other.items.erase(other.items.begin() + static_cast<std::ptrdiff_t>(best_j));
        if (given != kNone) move(one, other, given);
        if (got != kNone) move(other, one, got);
      }
    }
  }

  // Moves beginnings of parts, whose tokens have the least work, from bins with too many tokens to those with too few.
  void level(const std::vector<Item>& items, std::vector<Bin>& bins, int first) {
    std::vector<std::vector<Left>> own(bins.size());
    for (size_t b = 0; b < bins.size(); ++b) {
      const int64_t share_of_rank = share(first + static_cast<int>(b));
      bins[b].share = share_of_rank;
      for (const size_t i : bins[b].items) own[b].push_back(items[i].part);
    }
    const auto missing = [&](size_t b) { return bins[b].share - bins[b].tokens; };
    for (size_t a = 0; a < bins.size(); ++a) {
      while (missing(a) < 0) {
        size_t to = 0;
        for (size_t b = 1; b < bins.size(); ++b) to = missing(b) > missing(to) ? b : to;
        const int64_t wanted = std::min(-missing(a), missing(to));
        Left* best = nullptr;
        int64_t least = std::numeric_limits<int64_t>::max();
        for (Left& part : own[a]) {
          if (part.tokens() == 0) continue;
          const bool has_later = std::ranges::any_of(
              own[to], [&](const Left& other) { return other.base == part.base && other.end > part.end; });
          const int64_t rows =
              (has_later ? 0 : part.begin - part.base + 1) + 2 * std::max<int64_t>(0, wanted - part.tokens());
          if (rows < least) least = rows, best = &part;
        }
        const int64_t moved = std::min(wanted, best->tokens());
        own[to].push_back({best->base, best->begin, best->begin + moved});
        // The vector `own[a]` is another one than own[to], so `best` is still there.
        best->begin += moved;
        bins[a].tokens -= moved;
        bins[to].tokens += moved;
      }
    }
    for (size_t b = 0; b < bins.size(); ++b) {
      for (const Left& part : own[b]) append(dealt_[static_cast<size_t>(first) + b], {part.begin, part.end});
    }
  }

  const std::vector<int64_t>& before_;
  const Stretches& parts_;
  const int ranks_;
  const double mean_;
  std::vector<Left> left_;  // by falling reach
  std::vector<Stretches> dealt_;
  double rest_ = 0;  // work that is left
};

}  // namespace

void append(Stretches& pieces, Stretch piece) {
  if (piece.begin >= piece.end) return;
  if (!pieces.empty() && pieces.back().end == piece.begin) {
    pieces.back().end = piece.end;
  } else {
    pieces.push_back(piece);
  }
}

std::vector<std::vector<Stretches>> deal_parts(const std::vector<int64_t>& before, const Stretches& parts, int ranks) {
  PartDealer dealer(before, parts, ranks);
  std::vector<std::vector<Stretches>> ways = {dealer.in_turn()};
  struct Way {
    double whole, most;
  };
  for (const Way& way : {Way{0.95, 1.045}, {0.85, 1.03}, {0.7, 1.03}, {0.7, 1.015}, {0.55, 1.015}}) {
    ways.push_back(dealer.packed(way.whole, way.most));
  }
  return ways;
}

}  // namespace annulus
