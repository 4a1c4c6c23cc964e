// Mixture: which of several sources a row comes from, by their weights. Used by dataset.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace annulus {

// Of the first n draws each source has the seats that Webster's method (Sainte-Lague) gives it of n, so that its share
// is never a whole row off for long, and draw n is known without the draws before it. With weights {3, 1} the draws are
// of sources 0, 0, 1, 0, 0, 0, 1, 0, ... Nothing is random, so they are the same everywhere. Immutable and thus
// thread-safe.
class Mixture {
 public:
  // Weights above 0, at least one; only their ratios matter.
  explicit Mixture(std::vector<double> weights);

  struct Draw {
    size_t source = 0;
    int64_t number = 0;  // draws of that source before it
  };
  Draw at(int64_t n) const;  // n from 0

  // How many of the first n draws each source has. The time that this takes grows with the number of sources, not with
  // n.
  std::vector<int64_t> counts(int64_t n) const;

 private:
  size_t next(const std::vector<int64_t>& counts) const;

  std::vector<double> weights_;
};

}  // namespace annulus
