// Chooses the distance of an axis's ticks. Used by the charts of this package and by pictures of plans.
#pragma once

#include <cmath>

namespace annulus {

// Returns the least of 1, 2 and 5 times a power of ten that is at least `distance`, which is above 0.
inline double round_distance(double distance) {
  const double power = std::pow(10, std::floor(std::log10(distance)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= distance) return factor * power;
  }
  return 10 * power;
}

}  // namespace annulus
