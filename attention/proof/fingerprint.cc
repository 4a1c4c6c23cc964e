// Computes fingerprints of tiles and slices; see fingerprint.h.
#include "attention/proof/fingerprint.h"

#include <algorithm>

#include "common/splitmix64.h"

namespace annulus {
namespace {

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

Fingerprint subtract(Fingerprint a, Fingerprint b) { return a >= b ? a - b : a + kPrime - b; }
Fingerprint multiply(Fingerprint a, Fingerprint b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return add(static_cast<uint64_t>(product & kPrime), static_cast<uint64_t>(product >> 61));
}

enum Stream : uint64_t { kQuery = 1, kKey = 2, kBatch = 3, kHead = 4 };

// The pseudo-random weight of an index, as an element of the field.
Fingerprint weight(uint64_t stream, int64_t index) {
  return splitmix64((stream << 56) + static_cast<uint64_t>(index) * kSplitmix64Step) % kPrime;
}

// The stride of the sums that serve a span. A single member has no stride of its own and uses the sums of stride 1.
int64_t stride_of(const Span& s) { return s.count == 1 ? 1 : s.stride; }

// The number of keys within the band of one query that its mask shows, if there is one, and the sum of their weights.
// `sums` are the prefix sums along the stride of the keys.
struct Row {
  int64_t count = 0;
  Fingerprint weight = 0;
};
Row row_of(const std::vector<Fingerprint>& sums, const Span& keys, const Band& band, int64_t query,
           const MaskPlane* mask) {
  const int64_t stride = stride_of(keys);
  const int64_t first = std::max<int64_t>(0, ceil_div(query + band.lo - keys.begin, stride));
  const int64_t past = std::min(keys.count, floor_div(query + band.hi - keys.begin, stride) + 1);
  if (first >= past) return {};
  const auto between = [&](int64_t from, int64_t to) {
    return subtract(sums[static_cast<size_t>(keys.begin + to * stride)],
                    sums[static_cast<size_t>(keys.begin + from * stride)]);
  };
  if (mask == nullptr) return {past - first, between(first, past)};
  const MaskBits bits = mask->bits(query, keys.at(first));
  if (bits.words == nullptr) return {};
  Row row;
  for_each_shown(bits, keys.sub(first, past - first), [&](int64_t from, int64_t count) {
    row.count += count;
    row.weight = add(row.weight, between(first + from, first + from + count));
  });
  return row;
}

}  // namespace

Fingerprint add(Fingerprint a, Fingerprint b) {
  const uint64_t sum = a + b;
  return sum >= kPrime ? sum - kPrime : sum;
}

PositionWeights::PositionWeights(Of which, int64_t length) : which_(which), length_(length) {}

Fingerprint PositionWeights::at(int64_t position) const {
  return weight(which_ == Of::kQueries ? kQuery : kKey, position);
}

const std::vector<Fingerprint>& PositionWeights::prefix(int64_t stride) {
  std::vector<Fingerprint>& sums = prefixes_[stride];
  if (sums.empty()) {
    sums.assign(static_cast<size_t>(length_ + stride), 0);
    for (int64_t i = 0; i < length_; ++i) {
      sums[static_cast<size_t>(i + stride)] = add(sums[static_cast<size_t>(i)], at(i));
    }
  }
  return sums;
}

Fingerprint PositionWeights::sum(const Span& span) {
  if (span.empty()) return 0;
  const int64_t stride = stride_of(span);
  const std::vector<Fingerprint>& sums = prefix(stride);
  return subtract(sums[static_cast<size_t>(span.last() + stride)], sums[static_cast<size_t>(span.begin)]);
}

PairWeights::PairWeights(int64_t queries, int64_t keys)
    : queries_(PositionWeights::Of::kQueries, queries), keys_(PositionWeights::Of::kKeys, keys) {}

Fingerprint PairWeights::product(const Span& batch, const Span& heads) {
  const auto [found, fresh] =
      products_.try_emplace({batch.begin, batch.stride, batch.count, heads.begin, heads.stride, heads.count}, 0);
  if (fresh) {
    Fingerprint b = 0, h = 0;
    for (int64_t i = 0; i < batch.count; ++i) b = add(b, weight(kBatch, batch.at(i)));
    for (int64_t i = 0; i < heads.count; ++i) h = add(h, weight(kHead, heads.at(i)));
    found->second = multiply(b, h);
  }
  return found->second;
}

Fingerprint PairWeights::of(const Span& batch, const Span& heads, const Span& queries, const Span& keys,
                            const Band& band, const MaskPlane* mask) {
  if (queries.empty() || keys.empty() || band.empty()) return 0;
  const Fingerprint of_rows = product(batch, heads);
  if (mask == nullptr && band.unbounded_below() && band.unbounded_above()) {
    return multiply(of_rows, multiply(queries_.sum(queries), keys_.sum(keys)));
  }
  const std::vector<Fingerprint>& sums = keys_.prefix(stride_of(keys));
  Fingerprint total = 0;
  for (int64_t i = 0; i < queries.count; ++i) {
    const int64_t q = queries.at(i);
    total = add(total, multiply(queries_.at(q), row_of(sums, keys, band, q, mask).weight));
  }
  return multiply(of_rows, total);
}

Fingerprint PairWeights::of_owned(const Slice& slice, const MaskPlanes& masks, const std::vector<Span>& owned,
                                  int64_t* pairs) {
  const Span &queries = slice.queries, &keys = slice.keys;
  if (queries.empty() || keys.empty() || slice.band.empty()) return 0;
  const MaskPlane* const mask = slice.mask < 0 ? nullptr : &masks[static_cast<size_t>(slice.mask)];
  Fingerprint total = 0;
  int64_t count = 0;
  const std::vector<Fingerprint>* sums = nullptr;
  for (const Span& o : owned) {
    if (o.empty() || o.begin > queries.last() || o.last() < queries.begin) continue;
    if (!sums) sums = &keys_.prefix(stride_of(keys));
    const int64_t first = std::max<int64_t>(0, ceil_div(queries.begin - o.begin, o.stride));
    const int64_t past = std::min(o.count, floor_div(queries.last() - o.begin, o.stride) + 1);
    for (int64_t i = first; i < past; ++i) {
      const int64_t q = o.at(i);
      if (!queries.contains(q)) continue;
      const Row row = row_of(*sums, keys, slice.band, q, mask);
      total = add(total, multiply(queries_.at(q), row.weight));
      count += row.count;
    }
  }
  if (count == 0) return 0;
  *pairs += count * slice.batch.count * slice.heads.count;
  return multiply(product(slice.batch, slice.heads), total);
}

}  // namespace annulus
