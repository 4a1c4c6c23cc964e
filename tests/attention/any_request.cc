// See any_request.h.
#include "tests/attention/any_request.h"

#include <rapidcheck.h>

#include "tests/attention/any_pattern.h"

namespace annulus::testing {

PlanRequest any_request() {
  PlanRequest request;
  const auto length = [] {
    return *rc::gen::oneOf(rc::gen::element<int64_t>(0, 1, 2, 63, 64, 65, 97, 127, 128, 129, 160),
                           rc::gen::inRange<int64_t>(0, 130));
  };
  const int64_t q = length(), k = *rc::gen::inRange(0, 4) ? q : length();
  const int64_t kv_heads = *rc::gen::inRange(1, 4);
  request.shape = {*rc::gen::inRange(1, 4),
                   kv_heads * *rc::gen::inRange(1, 4),
                   kv_heads,
                   q,
                   k,
                   *rc::gen::inRange(0, 3) ? 0 : *rc::gen::element<int64_t>(-32, -16, -7, 16, 48, 51)};
  request.pattern = any_pattern(request.shape);
  request.layout = *rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped);
  request.schedule =
      *rc::gen::element(ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast, ScheduleKind::kAuto);
  request.ranks = *rc::gen::inRange(1, 17);
  if (q == k && *rc::gen::inRange(0, 5) == 0) {  // any lengths that add up
    request.uneven_lengths = any_documents(q, request.ranks);
  }
  return request;
}

}  // namespace annulus::testing
