// What several readers need together, for schedules over inner groups; see needs.h.
#include <utility>

#include "attention/plan/needs.h"

namespace annulus {

const std::vector<RowBits>& Needs::kept_read_of(int owner) {
  constexpr int64_t kMostBytes = 256'000'000;
  reads_.resize(static_cast<size_t>(ranks()));
  std::optional<std::vector<RowBits>>& kept = reads_[static_cast<size_t>(owner)];
  if (kept) return *kept;
  if (unkept_read_ && unkept_read_->front().owner == owner) return *unkept_read_;
  std::vector<RowBits> read = read_of(owner);
  int64_t bytes = 0;
  for (const RowBits& bits : read) bytes += static_cast<int64_t>(sizeof bits + bits.words.size() * sizeof(uint64_t));
  std::optional<std::vector<RowBits>>& place = kept_read_bytes_ + bytes <= kMostBytes ? kept : unkept_read_;
  if (&place == &kept) kept_read_bytes_ += bytes;
  return place.emplace(std::move(read));
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
