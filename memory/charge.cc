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

void StepCharges::then(Part part) { groups_.push_back({{std::move(part)}}); }

void StepCharges::then_all(std::vector<Part> parts) { groups_.push_back({std::move(parts)}); }

void StepCharges::then_offloaded(std::vector<Part> parts) { groups_.push_back({std::move(parts), /*offloaded=*/true}); }

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
  for (const Group& group : groups_) {
    for (const Part& part : group.parts) {
      bytes += sum(part, When::kStays) + (group.offloaded ? 0 : sum(part, When::kKept));
    }
  }
  return bytes;
}

int64_t StepCharges::kept(std::string_view what) const {
  int64_t bytes = 0;
  for (const Group& group : groups_) {
    for (const Part& part : group.parts) {
      for (const Charge& charge : part.charges) {
        const bool kept = charge.when == When::kStays || (charge.when == When::kKept && !group.offloaded);
        bytes += charge.what == what && kept ? charge.bytes : 0;
      }
    }
  }
  return bytes;
}

int64_t StepCharges::offloaded(int64_t (*taken)(int64_t bytes)) const {
  int64_t bytes = 0;
  for (const Group& group : groups_) {
    if (!group.offloaded) continue;
    for (const Part& part : group.parts) {
      for (const Charge& charge : part.charges) {
        if (charge.when == When::kKept && charge.bytes > 0) bytes += taken ? taken(charge.bytes) : charge.bytes;
      }
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
  };
  // The moments at which the forward of each part begins, and of each group ends.
  std::vector<std::vector<int>> begins;
  std::vector<int> ends;
  for (const Group& group : groups_) {
    begins.emplace_back();
    for (const Part& part : group.parts) {
      begin(part, /*backward=*/false);
      begins.back().push_back(now());
    }
    ends.push_back(now());
  }
  // What group i offloads leaves and returns beside the next group of several parts, or the last group.
  const auto next = [&](size_t i) {
    for (size_t other = i + 1; other < groups_.size(); ++other) {
      if (groups_[other].parts.size() > 1) return other;
    }
    return groups_.size() - 1;
  };
  std::vector<int> backwards(groups_.size());  // the moment at which the backward of each group begins
  for (size_t i = groups_.size(); i-- > 0;) {
    const Group& group = groups_[i];
    backwards[i] = now() + 1;
    for (size_t p = group.parts.size(); p-- > 0;) {
      begin(group.parts[p], /*backward=*/true);
      const int64_t bytes = sum(group.parts[p], When::kKept);
      hold(sum(group.parts[p], When::kStays), begins[i][p], now());
      if (!group.offloaded) {
        hold(bytes, begins[i][p], now());
      } else {
        hold(bytes, begins[i][p], ends[next(i)]);
        hold(bytes, backwards[next(i)], now());
      }
    }
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
