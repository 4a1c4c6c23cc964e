// What several readers need together, for schedules over inner groups; see needs.h.
#include <utility>

#include "attention/plan/needs.h"

namespace annulus {
namespace {

using Kept = std::vector<std::optional<std::vector<RowBits>>>;

// What is kept of an owner, or null.
const std::vector<RowBits>* find_kept(int owner, const Kept& kept, const std::optional<std::vector<RowBits>>& unkept) {
  const size_t o = static_cast<size_t>(owner);
  if (o < kept.size() && kept[o]) return &*kept[o];
  return unkept && unkept->front().owner == owner ? &*unkept : nullptr;
}

}  // namespace

const std::vector<RowBits>& Needs::keep(int owner, std::vector<RowBits> made, Kept& kept,
                                        std::optional<std::vector<RowBits>>& unkept) {
  constexpr int64_t kMostBytes = 256'000'000;
  int64_t bytes = 0;
  for (const RowBits& bits : made) bytes += static_cast<int64_t>(sizeof bits + bits.words.size() * sizeof(uint64_t));
  if (kept_read_bytes_ + bytes > kMostBytes) return unkept.emplace(std::move(made));
  kept_read_bytes_ += bytes;
  kept.resize(static_cast<size_t>(ranks()));
  return kept[static_cast<size_t>(owner)].emplace(std::move(made));
}

const std::vector<RowBits>& Needs::kept_read_of(int owner) {
  if (const auto* found = find_kept(owner, reads_, unkept_read_)) return *found;
  return keep(owner, read_of(owner), reads_, unkept_read_);
}

const std::vector<RowBits>& Needs::read_by_groups(int owner, int within) {
  if (within != within_) {
    groups_.clear();
    unkept_groups_.reset();
    within_ = within;
  }
  if (const auto* found = find_kept(owner, groups_, unkept_groups_)) return *found;
  std::vector<RowBits> together(static_cast<size_t>(ranks() / within), RowBits{owner, {}});
  const std::vector<RowBits>& read = kept_read_of(owner);
  for (int reader = 0; reader < ranks(); ++reader) {
    const RowBits& bits = read[static_cast<size_t>(reader)];
    if (reader != owner && !bits.words.empty()) together[static_cast<size_t>(reader / within)].join(bits);
  }
  return keep(owner, std::move(together), groups_, unkept_groups_);
}

RowBits Needs::read_by_any(int owner, const std::vector<int>& readers) {
  RowBits together{owner, {}};
  const std::vector<RowBits>& read = kept_read_of(owner);
  for (const int reader : readers) {
    if (const RowBits& bits = read[static_cast<size_t>(reader)]; !bits.words.empty()) together.join(bits);
  }
  return together;
}

RowSet Needs::rows_for(int owner, const std::vector<int>& readers) {
  const RowBits bits = read_by_any(owner, readers);
  return bits.any() ? rows(bits) : RowSet{};
}

}  // namespace annulus
