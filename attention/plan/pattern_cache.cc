// Caches patterns by their shapes and specs: cached_pattern of plan.h.
#include "attention/plan/plan.h"
#include "memory/caches.h"

namespace annulus {
namespace {

struct PatternKey {
  AttentionShape shape;
  PatternSpec pattern;

  uint64_t hash() const { return shape.hash() ^ pattern.hash(); }
  int64_t bytes() const { return static_cast<int64_t>(sizeof shape) + pattern.bytes(/*maps=*/false); }
  friend bool operator==(const PatternKey&, const PatternKey&) = default;
};

// With the masks, which it keeps.
int64_t bytes_of(const Pattern& pattern) {
  auto bytes = static_cast<int64_t>(sizeof pattern + pattern.slices.size() * sizeof(Slice));
  for (size_t i = 0; i < pattern.masks.size(); ++i) {
    if (i == 0 || pattern.masks[i].mask != pattern.masks[i - 1].mask) bytes += pattern.masks[i].mask->bytes();
  }
  return bytes;
}

}  // namespace

std::shared_ptr<const Pattern> cached_pattern(const PlanRequest& request) {
  // It is never destroyed, because a thread that plans ahead may use it until the process ends.
  static auto& cache = *new NamedCache<Pattern, PatternKey>("patterns");
  return cache.get(
      {request.shape, request.pattern}, [&] { return make_pattern(request.pattern, request.shape); }, bytes_of);
}

}  // namespace annulus
