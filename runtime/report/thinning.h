// Thins a column of numbers to what a screen can show, for the report of a run (run_data.cc). Needs no LibTorch. Thread
// safe: functions without state.
#pragma once

#include <cstddef>

#include "runtime/report/metrics_file.h"

namespace annulus {

// Returns at most about 2 * `buckets` of the points, in their order: the first and the last, and the least and the most
// of each bucket of as many points as the others, so that no peak is lost. Of a bucket with a number that is not finite
// the first such is kept too. All points are kept if there are no more than 2 * `buckets`.
Points thinned(const Points& points, size_t buckets);

// Joins intervals, if there are more than `most`, to as many of neighbours, with the sums of their seconds. An interval
// never spans two that do not touch.
std::vector<Interval> joined(const std::vector<Interval>& intervals, size_t most);

}  // namespace annulus
