// See stragglers.h.
#include "runtime/run/stragglers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace annulus {
namespace {

// The times that a FLOP of attention may take, in those of a FLOP of the rest.
constexpr double kAttentionCosts[] = {0.125, 0.25, 0.5, 1, 2, 4, 8};
// Unequal parts up to this share count as equal.
constexpr double kEqual = 1e-3;
// The median of n steps may be off by their noise times about twice the root of 1 / n (a standard error, of normal
// deviations). It must be above the share by one of these, and above nothing by five, as every step of a long run is
// tried.
constexpr double kAboveShare = 2, kAboveNothing = 10;
// How much longer a message takes over a slow link.
constexpr double kSlowLink = 4, kSlowLinkSeconds = 0.002;
// The part of a new window in the noise of earlier ones.
constexpr double kNewNoise = 0.125;

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return values.size() % 2 == 1 ? *middle : (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// Returns by how much each value is above the median of the others. Of an even number of others it is the larger middle
// one, so that two of three slow ranks are as slow as most.
std::vector<double> above_others(const std::vector<double>& values) {
  const size_t n = values.size();
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<double> above(n);
  for (size_t place = 0; place < n; ++place) {
    const auto other = [&](size_t i) { return values[order[i < place ? i : i + 1]]; };
    const double middle = other((n - 1) / 2);
    above[order[place]] = middle > 0 ? values[order[place]] / middle - 1 : 0;
  }
  return above;
}

bool alike(const std::vector<RankStep>& ranks, double RankStep::*part) {
  const auto [least, most] = std::minmax_element(
      ranks.begin(), ranks.end(), [&](const RankStep& a, const RankStep& b) { return a.*part < b.*part; });
  return (*most).*part - (*least).*part <= kEqual * std::abs((*most).*part);
}

}  // namespace

std::vector<double> excesses(const std::vector<RankStep>& ranks) {
  std::vector<double> least(ranks.size(), 0);
  const bool any = std::any_of(ranks.begin(), ranks.end(), [](const RankStep& r) { return !(r.seconds > 0); });
  if (ranks.size() < 2 || any) return least;
  std::vector<double> seconds(ranks.size());
  if (alike(ranks, &RankStep::tokens) && alike(ranks, &RankStep::attention)) {
    for (size_t i = 0; i < ranks.size(); ++i) seconds[i] = ranks[i].seconds;
    return above_others(seconds);
  }
  least.assign(ranks.size(), std::numeric_limits<double>::infinity());
  for (const double cost : kAttentionCosts) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      const double work = ranks[i].tokens + cost * ranks[i].attention;
      if (!(work > 0)) return std::vector<double>(ranks.size(), 0);
      seconds[i] = ranks[i].seconds / work;
    }
    const std::vector<double> above = above_others(seconds);
    for (size_t i = 0; i < ranks.size(); ++i) least[i] = std::min(least[i], above[i]);
  }
  return least;
}

std::optional<size_t> slow_link(const std::vector<double>& seconds, const std::vector<int>& host) {
  const size_t ranks = seconds.size();
  const auto between = [&](size_t i) { return host[i] != host[(i + 1) % ranks]; };
  std::optional<size_t> slowest;
  for (size_t i = 0; i < ranks; ++i) {
    std::vector<double> others;
    for (size_t j = 0; j < ranks; ++j) {
      if (j != i && between(j) == between(i)) others.push_back(seconds[j]);
    }
    if (others.empty()) continue;
    const double usual = median(others);
    const bool slow = seconds[i] >= kSlowLink * usual && seconds[i] >= usual + kSlowLinkSeconds;
    if (slow && (!slowest || seconds[i] > seconds[*slowest])) slowest = i;
  }
  return slowest;
}

bool Stragglers::any_slow() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const History& rank) { return rank.slow; });
}

double Stragglers::noise() const {
  std::vector<double> away;
  for (const History& rank : ranks_) {
    const double middle = median(rank.excess);
    for (const double excess : rank.excess) away.push_back(std::abs(std::log1p(excess) - std::log1p(middle)));
  }
  return median(std::move(away));
}

std::vector<Stragglers::Change> Stragglers::add(int64_t step, const std::vector<RankStep>& ranks) {
  if (!(settings_.share > 0) || ranks.size() < 2) return {};
  const auto window = static_cast<size_t>(std::max<int64_t>(1, settings_.steps));
  if (ranks_.size() != ranks.size()) {
    ranks_.assign(ranks.size(), {.excess = std::vector<double>(window, 0)});
    steps_.assign(window, 0);
    next_ = filled_ = 0;
  }
  const std::vector<double> now = excesses(ranks);
  for (size_t i = 0; i < ranks.size(); ++i) ranks_[i].excess[next_] = now[i];
  steps_[next_] = step;
  next_ = (next_ + 1) % window;
  filled_ = std::min(filled_ + 1, window);
  if (filled_ < window) return {};
  if (next_ == 0) {
    const double here = noise();
    noise_ = noise_ ? *noise_ + kNewNoise * (here - *noise_) : here;
  }

  std::vector<Change> changes;
  const double half = settings_.share / 2;
  double varies = -1;  // computed if it is needed
  for (size_t i = 0; i < ranks.size(); ++i) {
    History& rank = ranks_[i];
    const auto above = static_cast<size_t>(
        std::count_if(rank.excess.begin(), rank.excess.end(), [&](double excess) { return excess > half; }));
    if (rank.slow) {
      const double middle = 2 * above > window ? settings_.share : median(rank.excess);
      if (middle >= half) continue;
      rank.slow = false;
      changes.push_back({.rank = static_cast<int>(i), .slow = false, .excess = middle});
      continue;
    }
    if (above + window / 10 < window) continue;
    const double middle = median(rank.excess);
    if (middle <= settings_.share) continue;
    if (varies < 0) varies = std::max(noise(), noise_.value_or(0));
    const double off = varies / std::sqrt(static_cast<double>(window)), is = std::log1p(middle);
    if (is - kAboveShare * off <= std::log1p(settings_.share) || is <= kAboveNothing * off) continue;
    rank.slow = true;
    Change change{.rank = static_cast<int>(i), .slow = true, .excess = middle, .since = step};
    for (size_t at = 0; at < window; ++at) {
      if (rank.excess[at] > middle / 2) change.since = std::min(change.since, steps_[at]);
    }
    changes.push_back(change);
  }
  return changes;
}

}  // namespace annulus
