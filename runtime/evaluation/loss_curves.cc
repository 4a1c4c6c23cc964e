// See loss_curves.h.
#include "runtime/evaluation/loss_curves.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace annulus {
namespace {

// The bucket that doubles of a position: 0, 1, 2-3, 4-7, ... are 0, 1, 2, 3, ...
size_t doubling_bucket(int64_t position) {
  return static_cast<size_t>(std::bit_width(static_cast<uint64_t>(position)));
}

// Returns element `at`, or null if the sums end before it.
template <typename Sum>
const Sum* part_of(const std::vector<Sum>& sums, size_t at) {
  return at < sums.size() ? &sums[at] : nullptr;
}

}  // namespace

template <typename Sums>
LossBucket LossCurves::bucket_of(const Sums& by_position, int64_t begin, int64_t end) const {
  LossBucket bucket{.begin = begin, .end = end};
  double weight = 0;
  for (int64_t i = begin; i < end; ++i) {
    bucket.targets += by_position[static_cast<size_t>(i)].targets;
    bucket.nats += by_position[static_cast<size_t>(i)].nats;
    weight += by_position[static_cast<size_t>(i)].weight;
  }
  if (weighs_) bucket.weight = weight;
  return bucket;
}

LossCurves::LossCurves(int64_t length)
    : by_position_(static_cast<size_t>(length)), by_document_position_(static_cast<size_t>(length)) {}

// Bucket i of c covers [floor(i L / c), floor((i + 1) L / c)) of L positions.
size_t LossCurves::even_bucket(int64_t position) const {
  const auto length = static_cast<int64_t>(by_position_.size());
  return static_cast<size_t>(((position + 1) * std::min(kEven, length) - 1) / length);
}

void LossCurves::add(int64_t document, int64_t begin, int64_t count, const double* nats, const int64_t* targets,
                     const float* weights, int64_t first) {
  weighs_ = weighs_ || weights != nullptr;
  double weight = 1;
  const auto add_to = [&](Sum& sum, double loss) {
    ++sum.targets;
    sum.weight += weight;
    sum.nats += weight * loss;
  };
  const auto add_at = [&](std::vector<Sum>& sums, size_t at, double loss) {
    if (sums.size() <= at) sums.resize(at + 1);
    add_to(sums[at], loss);
  };
  OfDocument& of_document = documents_[document];
  for (int64_t i = 0; i < count; ++i) {
    if (targets[i] < 0) continue;
    if (weights != nullptr) weight = static_cast<double>(weights[i]);
    add_to(by_position_[static_cast<size_t>(begin + i)], nats[i]);
    add_to(by_document_position_[static_cast<size_t>(first + i)], nats[i]);
    add_to(of_document.all, nats[i]);
    add_at(of_document.doubling, doubling_bucket(begin + i), nats[i]);
    add_at(of_document.even, even_bucket(begin + i), nats[i]);
    add_at(of_document.document_doubling, doubling_bucket(first + i), nats[i]);
    add_at(of_document.document_even, even_bucket(first + i), nats[i]);
  }
}

// `sum_of` returns the part of a document that lies in the bucket, or null.
template <typename Of>
std::optional<double> LossCurves::error(const LossBucket& bucket, const Of& sum_of) const {
  double squares = 0, m = 0;
  for (const auto& [number, document] : documents_) {
    const Sum* sum = sum_of(document);
    if (sum == nullptr || sum->targets == 0) continue;
    squares += std::pow(sum->nats - bucket.mean() * sum->weight, 2);
    ++m;
  }
  if (m < 2) return std::nullopt;
  return 1.96 * std::sqrt(m / (m - 1) * squares) / bucket.weight.value_or(static_cast<double>(bucket.targets));
}

template <typename OfBucket>
std::vector<LossBucket> LossCurves::doubling(const std::vector<Sum>& by_position, const OfBucket& of_bucket) const {
  const auto length = static_cast<int64_t>(by_position.size());
  std::vector<LossBucket> buckets;
  for (int64_t begin = 0, end = 1; begin < length; begin = end, end *= 2) {
    end = std::min(end, length);
    buckets.push_back(bucket_of(by_position, begin, end));
    const size_t at = doubling_bucket(begin);
    buckets.back().error =
        error(buckets.back(), [&](const OfDocument& document) { return part_of(of_bucket(document), at); });
  }
  return buckets;
}

template <typename OfBucket>
std::vector<LossBucket> LossCurves::even(const std::vector<Sum>& by_position, const OfBucket& of_bucket) const {
  const auto length = static_cast<int64_t>(by_position.size());
  const int64_t count = std::min(kEven, length);
  std::vector<LossBucket> buckets;
  for (int64_t i = 0; i < count; ++i) {
    buckets.push_back(bucket_of(by_position, length * i / count, length * (i + 1) / count));
    buckets.back().error = error(buckets.back(), [&](const OfDocument& document) {
      return part_of(of_bucket(document), static_cast<size_t>(i));
    });
  }
  return buckets;
}

SourceLosses LossCurves::finish() const {
  SourceLosses losses;
  losses.rows = rows_;
  losses.all = bucket_of(by_position_, 0, static_cast<int64_t>(by_position_.size()));
  losses.documents = std::count_if(documents_.begin(), documents_.end(),
                                   [](const auto& document) { return document.second.all.targets > 0; });
  losses.all.error = error(losses.all, [](const OfDocument& document) { return &document.all; });
  losses.doubling = doubling(
      by_position_, [](const OfDocument& d) -> const auto& { return d.doubling; });
  losses.even = even(
      by_position_, [](const OfDocument& d) -> const auto& { return d.even; });
  losses.document_doubling = doubling(
      by_document_position_, [](const OfDocument& d) -> const auto& { return d.document_doubling; });
  losses.document_even = even(
      by_document_position_, [](const OfDocument& d) -> const auto& { return d.document_even; });
  return losses;
}

}  // namespace annulus
