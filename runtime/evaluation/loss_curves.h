// LossCurves adds up the losses of targets: over a source, by position, and by document. Used by evaluation.cc. Needs
// no LibTorch. Not thread safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "runtime/evaluation/results.h"

namespace annulus {

class LossCurves {
 public:
  // The number of even buckets, unless rows are shorter.
  static constexpr int64_t kEven = 16;

  // For rows of `length` positions.
  explicit LossCurves(int64_t length);

  // Adds a row's part that belongs to one document: positions [begin, begin + count) of the row. `nats` and `targets`
  // are those of the part's positions; targets below 0 do not count. `weights` are those of the targets; null: all
  // are 1. `first`: the position of the part's first one in its document, along the path in a tree.
  void add(int64_t document, int64_t begin, int64_t count, const double* nats, const int64_t* targets,
           const float* weights = nullptr, int64_t first = 0);
  void end_row() { ++rows_; }

  // Returns everything but the name and the bits per byte. The 95 % intervals of the whole and of buckets
  // take documents as the units that were drawn: with m documents of weight n_d and L_d nats in a bucket, the mean is
  // r = sum L_d / sum n_d and its variance m / (m - 1) * sum (L_d - r n_d)^2 / (sum n_d)^2 (the ratio estimator;
  // Cochran, Sampling Techniques, 3rd edition, equation 6.13, without the finite population's correction). There is
  // none with fewer than two documents.
  SourceLosses finish() const;

 private:
  struct Sum {
    int64_t targets = 0;
    double weight = 0;
    double nats = 0;  // times the weights
  };
  // Of one document: its sums, and those by bucket.
  struct OfDocument {
    Sum all;
    std::vector<Sum> doubling, even, document_doubling, document_even;
  };
  template <typename OfBucket>
  std::vector<LossBucket> doubling(const std::vector<Sum>& by_position, const OfBucket& of_bucket) const;
  template <typename OfBucket>
  std::vector<LossBucket> even(const std::vector<Sum>& by_position, const OfBucket& of_bucket) const;
  size_t even_bucket(int64_t position) const;
  template <typename Of>
  std::optional<double> error(const LossBucket& bucket, const Of& sum_of) const;

  template <typename Sums>
  LossBucket bucket_of(const Sums& by_position, int64_t begin, int64_t end) const;

  int64_t rows_ = 0;
  bool weighs_ = false;  // whether weights were given
  std::vector<Sum> by_position_, by_document_position_;
  std::map<int64_t, OfDocument> documents_;  // in order, because sums depend on it
};

}  // namespace annulus
