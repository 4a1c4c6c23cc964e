// See charge.h.
#include "memory/charge.h"

#include <algorithm>
#include <array>
#include <utility>

#include "memory/storage.h"

namespace annulus {
namespace {

int64_t sum(const Part& part, When when) {
  int64_t bytes = 0;
  for (const Charge& charge : part.charges) bytes += charge.when == when ? charge.bytes : 0;
  return bytes;
}

}  // namespace

void StepCharges::lasts(const Charge& charge) { lasting_.push_back(charge); }

void StepCharges::then(Part part) { stretches_.push_back({{}, {std::move(part)}, false}); }

void StepCharges::then_recomputed(Part whole, std::vector<Part> parts) {
  stretches_.push_back({std::move(whole), std::move(parts), true});
}

int64_t StepCharges::lasting() const {
  int64_t bytes = 0;
  for (const Charge& charge : lasting_) bytes += charge.bytes;
  return bytes;
}

int64_t StepCharges::lasting(std::string_view what) const {
  int64_t bytes = 0;
  for (const Charge& charge : lasting_) bytes += charge.what == what ? charge.bytes : 0;
  return bytes;
}

int64_t StepCharges::kept() const {
  int64_t bytes = 0;
  for (const Stretch& s : stretches_) bytes += sum(s.recomputed ? s.whole : s.parts[0], When::kKept);
  return bytes;
}

int64_t StepCharges::kept(std::string_view what) const {
  int64_t bytes = 0;
  for (const Stretch& s : stretches_) {
    for (const Charge& charge : (s.recomputed ? s.whole : s.parts[0]).charges) {
      bytes += charge.what == what && charge.when == When::kKept ? charge.bytes : 0;
    }
  }
  return bytes;
}

std::vector<StepCharges::Most> StepCharges::moments() const {
  std::vector<Most> moments;
  Storage storage;
  const auto now = [&] { return static_cast<int>(moments.size()) - 1; };
  const auto hold = [&](int64_t bytes, int first, int last) { storage.add({bytes, 0, {first, last}}); };
  const auto begin = [&](const Part& part, bool backward) {
    moments.push_back({0, part.name, backward});
    hold(sum(part, backward ? When::kBackward : When::kForward), now(), now());
    return now();
  };
  std::vector<int> begins;  // the moment at which the forward of each stretch begins
  for (const Stretch& s : stretches_) {
    begins.push_back(now() + 1);
    for (const Part& part : s.parts) {
      const int at = begin(part, /*backward=*/false);
      if (s.recomputed) hold(sum(part, When::kKept), at, at);  // it is not kept beyond this moment
    }
  }
  for (size_t i = stretches_.size(); i-- > 0;) {
    const Stretch& s = stretches_[i];
    const int again = now() + 1;
    std::vector<int> forwards;
    if (s.recomputed) {
      for (const Part& part : s.parts) forwards.push_back(begin(part, /*backward=*/false));
    }
    for (size_t p = s.parts.size(); p-- > 0;) {
      begin(s.parts[p], /*backward=*/true);
      hold(sum(s.parts[p], When::kKept), s.recomputed ? forwards[p] : begins[i], now());
    }
    if (!s.recomputed) continue;
    hold(sum(s.whole, When::kBackward), again, now());
    hold(sum(s.whole, When::kKept), begins[i], now());
  }
  if (moments.empty()) moments.push_back({});
  hold(lasting(), 0, now());
  const std::vector<int64_t> held = storage.held(std::array<int64_t, 1>{1});
  for (size_t m = 0; m < moments.size(); ++m) moments[m].bytes = held[m];
  return moments;
}

StepCharges::Most StepCharges::most() const {
  const std::vector<Most> all = moments();
  return *std::max_element(all.begin(), all.end(), [](const Most& a, const Most& b) { return a.bytes < b.bytes; });
}

int64_t StepCharges::most_in_backward_of(std::string_view part) const {
  int64_t bytes = 0;
  for (const Most& m : moments()) {
    if (m.backward && m.part == part) bytes = std::max(bytes, m.bytes);
  }
  return bytes;
}

}  // namespace annulus
