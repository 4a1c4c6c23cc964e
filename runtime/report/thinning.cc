// See thinning.h.
#include "runtime/report/thinning.h"

#include <algorithm>
#include <cmath>

namespace annulus {

Points thinned(const Points& points, size_t buckets) {
  const size_t size = points.x.size();
  if (size <= 2 * buckets || buckets == 0) return points;
  std::vector<bool> kept(size, false);
  kept.front() = kept.back() = true;
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    const size_t begin = bucket * size / buckets, end = (bucket + 1) * size / buckets;
    size_t least = end, most = end, broken = end;
    for (size_t i = begin; i < end; ++i) {
      if (!std::isfinite(points.y[i])) {
        if (broken == end) broken = i;
        continue;
      }
      if (least == end || points.y[i] < points.y[least]) least = i;
      if (most == end || points.y[i] > points.y[most]) most = i;
    }
    for (const size_t i : {least, most, broken}) {
      if (i != end) kept[i] = true;
    }
  }
  Points out;
  for (size_t i = 0; i < size; ++i) {
    if (kept[i]) out.add(points.x[i], points.y[i]);
  }
  return out;
}

std::vector<Interval> joined(const std::vector<Interval>& intervals, size_t most) {
  if (most == 0 || intervals.size() <= most) return intervals;
  std::vector<Interval> out;
  const size_t each = (intervals.size() + most - 1) / most;
  size_t inside = 0;
  for (const Interval& interval : intervals) {
    if (inside == 0 || inside == each || out.back().end != interval.begin) {
      out.push_back(interval);
      inside = 1;
      continue;
    }
    ++inside;
    out.back().end = interval.end;
    for (size_t i = 0; i < interval.seconds.size(); ++i) out.back().seconds[i] += interval.seconds[i];
  }
  return out;
}

}  // namespace annulus
