// What several readers need together, for schedules over inner groups; see needs.h.
#include "attention/plan/needs.h"

namespace annulus {
namespace {

int64_t bytes_of(const std::vector<RowBits>& list) {
  int64_t bytes = 0;
  for (const RowBits& bits : list) bytes += static_cast<int64_t>(sizeof bits + bits.words.size() * sizeof(uint64_t));
  return bytes;
}

}  // namespace

const std::vector<RowBits>& Needs::kept_read_of(int owner) {
  return reads_.get(
      owner, [&] { return read_of(owner); }, bytes_of);
}

const std::vector<RowBits>& Needs::read_by_groups(int owner, int within) {
  if (std::exchange(within_, within) != within) groups_ = {};
  const auto make = [&] {
    std::vector<RowBits> together(static_cast<size_t>(ranks() / within), RowBits{owner, {}});
    const std::vector<RowBits>& read = kept_read_of(owner);
    for (int reader = 0; reader < ranks(); ++reader) {
      const RowBits& bits = read[static_cast<size_t>(reader)];
      if (reader != owner && !bits.words.empty()) together[static_cast<size_t>(reader / within)].join(bits);
    }
    return together;
  };
  return groups_.get(owner, make, bytes_of);
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
