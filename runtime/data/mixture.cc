// See mixture.h.
#include "runtime/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/error.h"

namespace annulus {
namespace {

// What a source with `count` draws offers for the next one. The largest offer gets it.
double offer(double weight, int64_t count) { return weight / (static_cast<double>(count) + 0.5); }

// How many of a source's offers are above `least`.
int64_t offers_above(double weight, double least) {
  auto count = std::max<int64_t>(0, static_cast<int64_t>(std::floor(weight / least + 0.5)) - 2);
  while (offer(weight, count) > least) ++count;
  return count;
}

}  // namespace

Mixture::Mixture(std::vector<double> weights) : weights_(std::move(weights)) {
  const auto good = [](double w) { return w > 0 && std::isfinite(w); };
  if (weights_.empty() || !std::all_of(weights_.begin(), weights_.end(), good)) {
    throw Error(ErrorKind::kInternal, "data", "weights of a mixture were not checked");
  }
}

size_t Mixture::next(const std::vector<int64_t>& counts) const {
  size_t best = 0;
  for (size_t i = 1; i < weights_.size(); ++i) {
    if (offer(weights_[i], counts[i]) > offer(weights_[best], counts[best])) best = i;
  }
  return best;
}

std::vector<int64_t> Mixture::counts(int64_t n) const {
  if (weights_.size() == 1) return {n};
  std::vector<int64_t> counts(weights_.size(), 0);
  // Draws go by falling offers, so the offers above any bound are the first draws. This bound gives a few too few, and
  // the rest are added one by one.
  const auto sources = static_cast<int64_t>(weights_.size());
  if (n > 2 * sources) {
    const double least = std::accumulate(weights_.begin(), weights_.end(), 0.0) / static_cast<double>(n - sources);
    for (size_t i = 0; i < weights_.size(); ++i) counts[i] = offers_above(weights_[i], least);
  }
  int64_t drawn = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (drawn > n) throw Error(ErrorKind::kInternal, "data", "a mixture drew too many rows");
  for (; drawn < n; ++drawn) ++counts[next(counts)];
  return counts;
}

Mixture::Draw Mixture::at(int64_t n) const {
  const std::vector<int64_t> before = counts(n);
  const size_t source = next(before);
  return {source, before[source]};
}

}  // namespace annulus
