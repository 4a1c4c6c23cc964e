// Deals positions to ranks by their work; see balance.h.
#include "attention/plan/balance.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "attention/pattern/block_map.h"
#include "attention/plan/part_dealer.h"
#include "common/error.h"

namespace annulus {
namespace {

// Stretches that lie one after the other. Places are counted in tokens from the beginning of the first one.
class Line {
 public:
  Line(const PositionWork& work, const Stretches& pieces) : work_(work), pieces_(pieces) {
    for (const Stretch& p : pieces) {
      begins_.push_back(tokens_);
      befores_.push_back(pairs_);
      tokens_ += p.end - p.begin;
      pairs_ += of(work_.before, p.end) - of(work_.before, p.begin);
    }
  }

  int64_t tokens() const { return tokens_; }
  int64_t pairs() const { return pairs_; }
  const Stretches& pieces() const { return pieces_; }
  int64_t begin(size_t piece) const { return begins_[piece]; }

  // The pairs before a place, and the rows that a cut there costs; none where the pieces are apart anyway.
  struct Cut {
    int64_t pairs = 0, rows = 0;
  };
  Cut cut(int64_t place) const {
    if (place >= tokens_) return {pairs_, 0};
    const size_t i = piece_of(place);
    const int64_t x = pieces_[i].begin + place - begins_[i];
    return {befores_[i] + of(work_.before, x) - of(work_.before, pieces_[i].begin),
            place == begins_[i] ? 0 : of(work_.crossing, x)};
  }

  // Appends the pieces between two places.
  void take(int64_t first, int64_t past, Stretches& to) const {
    if (first >= past) return;
    for (size_t i = piece_of(first); i < pieces_.size() && begins_[i] < past; ++i) {
      const Stretch& p = pieces_[i];
      append(to, {p.begin + std::max<int64_t>(0, first - begins_[i]), std::min(p.end, p.begin + past - begins_[i])});
    }
  }

  // Calls f(place) for the place of each member of the rising positions.
  template <typename F>
  void for_each_place(const std::vector<int64_t>& positions, const F& f) const {
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Stretch& p = pieces_[i];
      for (auto x = std::lower_bound(positions.begin(), positions.end(), p.begin); x != positions.end() && *x < p.end;
           ++x) {
        f(begins_[i] + *x - p.begin);
      }
    }
  }

 private:
  static int64_t of(const std::vector<int64_t>& values, int64_t i) { return values[static_cast<size_t>(i)]; }
  size_t piece_of(int64_t place) const {
    return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), place) - begins_.begin() - 1);
  }

  const PositionWork& work_;
  const Stretches& pieces_;
  std::vector<int64_t> begins_, befores_;  // by piece: tokens and pairs before it
  int64_t tokens_ = 0, pairs_ = 0;
};

// The best of the cuts that were tried: the least excess over what ranks may have, and among equal ones (all that are
// within it) the fewest rows.
struct Best {
  int64_t place = -1, rows = 0;
  double excess = std::numeric_limits<double>::infinity();  // 1: within

  void offer(int64_t at, double by, int64_t cost) {
    by = std::max(by, 1.0);
    if (by < excess || (by == excess && cost < rows)) place = at, excess = by, rows = cost;
  }
  bool within() const { return excess <= 1; }
};

// The work of dealing some stretches of a sequence, of which each rank is to have its share of tokens, and all together
// have so many pairs. Each function below deals all ranks.
class Dealer {
 public:
  Dealer(const PositionWork& work, std::vector<int64_t> shares, int64_t pairs)
      : work_(work), shares_(std::move(shares)), ranks_(static_cast<int>(shares_.size())) {
    mean_ = std::max(1e-9, static_cast<double>(pairs) / ranks_);
    const auto length = static_cast<int64_t>(work.before.size()) - 1;
    for (int64_t x = 1; x < length; ++x) {
      const auto i = static_cast<size_t>(x);
      if (2 * work.crossing[i] < work.crossing[i - 1]) borders_.push_back(x);
    }
    while ((int64_t{1} << levels_) < ranks_) ++levels_;
  }

  // Halves the ranks again and again.
  std::vector<Stretches> halved(const Stretches& circle) {
    std::vector<Stretches> dealt(static_cast<size_t>(ranks_));
    halve(circle, 0, ranks_, 0, dealt);
    return dealt;
  }

  // Gives each rank some of the end of the line, which has the most work for a token, and as much of its beginning,
  // which has the least, as is needed for the rank's tokens; from the rank at which this does not come out even on,
  // the rest is halved. So ranks have few pieces of long documents, and short ones beside them.
  std::vector<Stretches> from_both_ends(const Stretches& pieces) {
    std::vector<Stretches> dealt(static_cast<size_t>(ranks_));
    const Line line(work_, pieces);
    int64_t first = 0, past = line.tokens();
    for (int r = 0; r < ranks_; ++r) {
      Stretches& own = dealt[static_cast<size_t>(r)];
      const int64_t tokens = share(r);
      const Best best = r + 1 < ranks_ ? best_ends(line, first, past, tokens, ranks_ - r) : Best{tokens, 0, 1};
      if (!best.within()) {
        Stretches rest;
        line.take(first, past, rest);
        halve(rest, r, ranks_ - r, levels_ - 1, dealt);
        break;
      }
      line.take(past - best.place, past, own);
      line.take(first, first + tokens - best.place, own);
      past -= best.place;
      first += tokens - best.place;
    }
    return dealt;
  }

  double mean() const { return mean_; }

 private:
  int64_t share(int rank) const { return shares_[static_cast<size_t>(rank)]; }

  // The best number of tokens that a rank takes from the end of [first, past) of the line, of which `ranks` ranks are
  // to have all.
  Best best_ends(const Line& line, int64_t first, int64_t past, int64_t tokens, int ranks) const {
    constexpr double kRest = 0.01;  // how far the mean of those that follow may rise
    const int64_t before = line.cut(first).pairs, after = line.cut(past).pairs;
    const double own = mean_ * (1 + kBalanceTolerance);
    const double rest = mean_ * (1 + (ranks == 2 ? kBalanceTolerance : kRest)) * (ranks - 1);
    Best best;
    const auto consider = [&](int64_t ending) {
      if (ending < 0 || ending > tokens) return;
      const Line::Cut high = line.cut(past - ending), low = line.cut(first + tokens - ending);
      const int64_t pairs = after - high.pairs + low.pairs - before;
      best.offer(ending, std::max(static_cast<double>(pairs) / own, static_cast<double>(after - before - pairs) / rest),
                 (ending > 0 ? high.rows : 0) + (ending < tokens ? low.rows : 0));
    };
    consider(tokens);
    for (const Stretch& p :
         {Stretch{first, std::min(past, first + tokens)}, Stretch{std::max(first, past - tokens), past}}) {
      Stretches near;
      line.take(p.begin, p.end, near);
      int64_t place = p.begin;
      for (const Stretch& piece : near) {
        const auto offer = [&](int64_t x) {
          const int64_t at = place + x - piece.begin;
          consider(p.begin == first ? tokens - (at - first) : past - at);
        };
        offer(piece.begin);
        for (auto x = std::lower_bound(borders_.begin(), borders_.end(), piece.begin);
             x != borders_.end() && *x < piece.end; ++x) {
          offer(*x);
        }
        place += piece.end - piece.begin;
      }
    }
    for (int64_t step = kBalanceChunk; step >= kBalanceChunk / 8; step /= 2) {
      for (int64_t ending = 0; ending <= tokens; ending += step) consider(ending);
      if (best.within()) break;
    }
    return best;
  }

  // Deals `circle` to the ranks first, ..., first + ranks - 1.
  void halve(const Stretches& circle, int first, int ranks, int level, std::vector<Stretches>& dealt) const {
    if (ranks == 1) {
      dealt[static_cast<size_t>(first)] = circle;
      return;
    }
    const int some = ranks / 2;
    const Line line(work_, circle);
    const int64_t all = line.tokens();
    int64_t tokens = 0;
    for (int r = first; r < first + some; ++r) tokens += share(r);
    const int64_t begin = best_arc(line, tokens, some, ranks, level), end = begin + tokens;
    Stretches arc, rest;
    line.take(begin, std::min(end, all), arc);
    line.take(0, end - all, arc);
    line.take(std::max<int64_t>(0, end - all), begin, rest);
    // The rest begins after the arc, so that what was cut off last stays apart from its neighbours.
    Stretches around;
    line.take(end, all, around);
    for (const Stretch& p : rest) append(around, p);
    halve(arc, first, some, level + 1, dealt);
    halve(around, first + some, ranks - some, level + 1, dealt);
  }

  // The place at which the best arc of so many tokens for `some` of the ranks begins.
  int64_t best_arc(const Line& line, int64_t tokens, int some, int ranks, int level) const {
    const int64_t all = line.tokens();
    if (all == 0) return 0;
    // Each level uses up a part of the tolerance.
    const double most = mean_ * (1 + kBalanceTolerance * std::min(1.0, (level + 1.0) / std::max(1, levels_)));
    Best best;
    const auto consider = [&](int64_t begin) {
      if (begin < 0) begin += all;
      const int64_t end = begin + tokens;
      const bool around = end >= all;
      const Line::Cut from = line.cut(begin), to = line.cut(around ? end - all : end);
      const int64_t pairs = to.pairs - from.pairs + (around ? line.pairs() : 0);
      best.offer(
          begin,
          std::max(static_cast<double>(pairs) / some, static_cast<double>(line.pairs() - pairs) / (ranks - some)) /
              most,
          from.rows + to.rows);
    };
    const auto begin_or_end = [&](int64_t place) {
      consider(place);
      consider(place - tokens);
    };
    for (size_t i = 0; i < line.pieces().size(); ++i) begin_or_end(line.begin(i));
    line.for_each_place(borders_, begin_or_end);
    for (int64_t step = kBalanceChunk; step >= 1; step /= 2) {
      for (size_t i = 0; i < line.pieces().size(); ++i) {
        const Stretch& p = line.pieces()[i];
        for (int64_t x = (p.begin / step + 1) * step; x < p.end; x += step) consider(line.begin(i) + x - p.begin);
      }
      if (best.within()) break;
    }
    return best.place;
  }

  const PositionWork& work_;
  const std::vector<int64_t> shares_;
  const int ranks_;
  double mean_ = 0;               // pairs of a rank
  std::vector<int64_t> borders_;  // positions before which a cut costs far less than one token before
  int levels_ = 0;
};

// Returns the parts of the sequence that no query crosses to a key, joined to at least `least` tokens.
Stretches parts_apart(const PositionWork& work, int64_t least) {
  const auto length = static_cast<int64_t>(work.before.size()) - 1;
  Stretches parts;
  int64_t begin = 0;
  for (int64_t x = 1; x <= length; ++x) {
    if (x < length && (work.crossing[static_cast<size_t>(x)] != 0 || x - begin < least)) continue;
    parts.push_back({begin, x});
    begin = x;
  }
  return parts;
}

int64_t pairs_in(const PositionWork& work, const Stretches& stretches) {
  int64_t pairs = 0;
  for (const Stretch& s : stretches) {
    pairs += work.before[static_cast<size_t>(s.end)] - work.before[static_cast<size_t>(s.begin)];
  }
  return pairs;
}

struct Quality {
  double most = 0;   // the most pairs of a rank
  int64_t rows = 0;  // that ranks need of others, as far as one slice tells
};

Quality quality(const Pattern& pattern, const PositionWork& work, const std::vector<Stretches>& dealt) {
  struct Owned {
    Stretch piece;
    size_t rank = 0;
    int64_t before = 0;  // the rank's positions before it
  };
  Quality found;
  std::vector<Owned> all;
  std::vector<std::vector<Owned>> by_rank(dealt.size());
  for (size_t r = 0; r < dealt.size(); ++r) {
    int64_t positions = 0;
    for (const Stretch& p : dealt[r]) {
      by_rank[r].push_back({p, r, positions});
      positions += p.end - p.begin;
    }
    found.most = std::max(found.most, static_cast<double>(pairs_in(work, dealt[r])));
    all.insert(all.end(), by_rank[r].begin(), by_rank[r].end());
  }
  std::ranges::sort(all, [](const Owned& a, const Owned& b) { return a.piece.begin < b.piece.begin; });
  // The number of a rank's positions before x.
  const auto owned_before = [&](size_t rank, int64_t x) -> int64_t {
    const std::vector<Owned>& own = by_rank[rank];
    const auto next = std::ranges::partition_point(own, [&](const Owned& o) { return o.piece.begin < x; });
    if (next == own.begin()) return 0;
    const Owned& last = *(next - 1);
    return last.before + std::min(x, last.piece.end) - last.piece.begin;
  };
  std::vector<int64_t> seen(dealt.size());              // the first key that a rank has not needed of the slice
  std::vector<size_t> seen_in(dealt.size(), SIZE_MAX);  // the slice of which this is
  for (size_t s = 0; s < pattern.slices.size(); ++s) {
    const Slice& slice = pattern.slices[s];
    if (slice.queries.empty() || slice.keys.empty()) continue;
    const int64_t last_query = slice.queries.last();
    int64_t rows = 0;
    auto o =
        std::ranges::partition_point(all, [&](const Owned& owned) { return owned.piece.end <= slice.queries.begin; });
    for (; o != all.end() && o->piece.begin <= last_query; ++o) {
      const int64_t q0 = std::max(o->piece.begin, slice.queries.begin), q1 = std::min(o->piece.end - 1, last_query);
      int64_t begin = slice.band.unbounded_below() ? slice.keys.begin : std::max(slice.keys.begin, q0 + slice.band.lo);
      const int64_t last =
          slice.band.unbounded_above() ? slice.keys.last() : std::min(slice.keys.last(), q1 + slice.band.hi);
      if (seen_in[o->rank] == s) begin = std::max(begin, seen[o->rank]);
      if (begin > last) continue;
      seen[o->rank] = last + 1;
      seen_in[o->rank] = s;
      rows += last + 1 - begin - (owned_before(o->rank, last + 1) - owned_before(o->rank, begin));
    }
    found.rows += rows * slice.batch.count / slice.keys.stride;
  }
  return found;
}

// The layout that has each rank's stretches, in rising order.
Layout in_order(int64_t length, std::vector<Stretches> dealt) {
  Layout layout{length, std::vector<std::vector<Span>>(dealt.size())};
  for (size_t r = 0; r < dealt.size(); ++r) {
    std::ranges::sort(dealt[r], {}, &Stretch::begin);
    Stretches joined;
    for (const Stretch& p : dealt[r]) append(joined, p);
    for (const Stretch& p : joined) layout.spans[r].push_back(Span::range(p.begin, p.end));
  }
  return layout;
}

// Deals each part as zigzag deals a row, as evenly as tokens allow; in the end each rank has its share.
void deal_zigzag(const Stretches& parts, const std::vector<int64_t>& shares, std::vector<Stretches>& dealt) {
  const auto ranks = static_cast<int64_t>(shares.size());
  const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0});
  std::vector<int64_t> left = shares;
  int64_t before = 0;
  for (const Stretch& part : parts) {
    const int64_t tokens = part.end - part.begin;
    before += tokens;
    // Those whose share is the furthest from what it should be after this part have one token more. The last part gives
    // each what it still lacks.
    std::vector<int64_t> own = left;
    if (before < all) {
      std::ranges::fill(own, tokens / ranks);
      std::vector<size_t> order(shares.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::ranges::stable_sort(order, std::greater<>(), [&](size_t r) {
        return static_cast<__int128>(left[r]) * all - static_cast<__int128>(shares[r]) * (all - before);
      });
      for (int64_t i = 0; i < tokens % ranks; ++i) ++own[order[static_cast<size_t>(i)]];
    }
    int64_t begin = part.begin;
    const auto take = [&](size_t r, int64_t count) { append(dealt[r], {begin, begin + count}), begin += count; };
    for (size_t r = 0; r < own.size(); ++r) take(r, (own[r] + 1) / 2);
    for (size_t r = own.size(); r-- > 0;) take(r, own[r] / 2);
    for (size_t r = 0; r < own.size(); ++r) left[r] -= own[r];
  }
}

}  // namespace

Layout balanced_layout(const Pattern& pattern, int ranks) {
  const int64_t length = pattern.shape.q_len;
  const std::vector<int64_t> shares = layout_counts(LayoutKind::kContiguous, length, ranks);
  const PositionWork work = position_work(pattern);
  Dealer dealer(work, shares, work.before.back());
  std::vector<Stretches> dealt = dealer.halved({{0, length}});
  // Parts that need nothing of each other may lie on the circle in any order: by their work for a token.
  Stretches parts = pattern.shape.k_len == length
                        ? parts_apart(work, std::clamp<int64_t>(length / ranks / 8, 1, kBalanceChunk))
                        : Stretches{};
  if (parts.size() > 1 && ranks > 1) {
    constexpr double kEven = 1.05;  // beyond this, evenness counts before bytes
    const auto worth = [&](const std::vector<Stretches>& candidate) {
      std::vector<Stretches> sorted = candidate;
      for (Stretches& own : sorted) {
        std::ranges::sort(own, {}, &Stretch::begin);
      }
      const Quality q = quality(pattern, work, sorted);
      return std::pair(std::max(kEven, q.most / dealer.mean()), q.rows);
    };
    const auto density = [&](const Stretch& p) { return 1.0 * pairs_in(work, {p}) / (p.end - p.begin); };
    std::ranges::stable_sort(parts, [&](const Stretch& a, const Stretch& b) { return density(a) < density(b); });
    auto best = worth(dealt);
    std::vector<std::vector<Stretches>> others = deal_parts(work.before, parts, ranks);
    others.push_back(dealer.from_both_ends(parts));
    for (std::vector<Stretches>& other : others) {
      const auto found = worth(other);
      if (found < best) best = found, dealt = std::move(other);
    }
  }
  return in_order(length, std::move(dealt));
}

Layout per_document_layout(const Pattern& pattern, int ranks) {
  const int64_t length = pattern.shape.q_len;
  std::vector<int64_t> shares = layout_counts(LayoutKind::kContiguous, length, ranks);
  const PositionWork work = position_work(pattern);
  Stretches parts, rest;
  int64_t tokens = 0;
  for (const Stretch& part : parts_apart(work, 1)) {
    if (part.end - part.begin >= 2 * int64_t{ranks} * kLeastPiece) {
      parts.push_back(part);
    } else {
      append(rest, part);
      tokens += part.end - part.begin;
    }
  }
  // Of the rest all ranks have as many tokens, to one.
  std::vector<int64_t> of_rest(shares.size(), tokens / ranks);
  std::vector<size_t> order(shares.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), [&](size_t r) { return shares[r]; });
  for (int64_t i = 0; i < tokens % ranks; ++i) ++of_rest[order[static_cast<size_t>(i)]];
  for (size_t r = 0; r < shares.size(); ++r) shares[r] -= of_rest[r];
  std::vector<Stretches> dealt = Dealer(work, std::move(of_rest), pairs_in(work, rest)).halved(rest);
  deal_zigzag(parts, shares, dealt);
  return in_order(length, std::move(dealt));
}

PatternSpec without_masks(PatternSpec spec) {
  for (PatternSpec& member : spec.members) member = without_masks(std::move(member));
  spec.mask = {};
  return spec;
}

PatternSpec with_nearest_blocks(PatternSpec spec, const AttentionShape& shape) {
  for (PatternSpec& member : spec.members) member = with_nearest_blocks(std::move(member), shape);
  if (spec.kind != PatternSpec::Kind::kBlocks || spec.blocks.map != BlocksSpec::Map::kAdaptive) return spec;
  const int64_t block = spec.blocks.block, keep = spec.blocks.keep;
  BlockMap map{.block = block,
               .query_blocks = ceil_div(shape.q_len, block),
               .key_blocks = ceil_div(shape.k_len, block),
               .offsets = {0},
               .runs = {}};
  for (int64_t i = 0; i < map.query_blocks; ++i) {
    const int64_t last = std::min(map.key_blocks, spec.causal ? i + 1 : i + 1 + keep / 2);
    const int64_t begin = std::max<int64_t>(0, last - keep);
    const int64_t end = spec.causal ? last : std::min(map.key_blocks, begin + keep);
    if (begin < end) map.runs.push_back({begin, end});
    map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
  }
  spec.blocks = given_map(std::make_shared<const BlockMap>(std::move(map)));
  return spec;
}

namespace {

// Unions within unions are members of their own, so that nothing is nested. How branches are combined does not matter
// for their pairs, and a union may not contain what divides a whole output.
void add_member(PatternSpec& together, PatternSpec pattern) {
  if (pattern.kind == PatternSpec::Kind::kUnion && pattern.documents.empty() && pattern.kept_keys.empty()) {
    for (const PatternSpec& member : pattern.members) add_member(together, member);
    return;
  }
  if (pattern.kind == PatternSpec::Kind::kDilated) pattern.dilated.combine = DilatedSpec::Combine::kLse;
  together.members.push_back(std::move(pattern));
}

}  // namespace

PatternSpec balanced_together(const std::vector<PatternSpec>& layers) {
  constexpr int64_t kMostMembers = 16;
  std::vector<std::pair<const PatternSpec*, int64_t>> distinct;
  for (const PatternSpec& layer : layers) {
    const auto same = std::ranges::find_if(distinct, [&](const auto& d) { return *d.first == layer; });
    if (same != distinct.end()) {
      ++same->second;
    } else {
      distinct.emplace_back(&layer, 1);
    }
  }
  if (distinct.size() == 1) return *distinct[0].first;
  int64_t divisor = 0;
  for (const auto& [pattern, count] : distinct) divisor = std::gcd(divisor, count);
  const auto total = static_cast<int64_t>(layers.size());
  if (divisor > 0 && total / divisor > kMostMembers) divisor = ceil_div(total, kMostMembers);
  PatternSpec together;
  together.kind = PatternSpec::Kind::kUnion;
  for (const auto& [pattern, count] : distinct) {
    for (int64_t i = std::max<int64_t>(1, count / divisor); i > 0; --i) add_member(together, *pattern);
  }
  return together;
}

}  // namespace annulus
