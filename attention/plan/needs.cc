// See needs.h.
#include "attention/plan/needs.h"

#include <algorithm>
#include <bit>
#include <map>
#include <tuple>

namespace annulus {
namespace {

void set_bits(std::vector<uint64_t>& words, int64_t first, int64_t stride, int64_t count) {
  if (stride != 1) {
    for (int64_t i = 0, bit = first; i < count; ++i, bit += stride) {
      words[static_cast<size_t>(bit >> 6)] |= uint64_t{1} << (bit & 63);
    }
    return;
  }
  for (int64_t bit = first, past = first + count; bit < past;) {
    const int64_t n = std::min(past - bit, 64 - (bit & 63));
    const uint64_t mask = n == 64 ? ~uint64_t{0} : ((uint64_t{1} << n) - 1) << (bit & 63);
    words[static_cast<size_t>(bit >> 6)] |= mask;
    bit += n;
  }
}

int64_t count_bits(const std::vector<uint64_t>& words) {
  int64_t n = 0;
  for (const uint64_t word : words) n += std::popcount(word);
  return n;
}

// The set members of `words`, ascending.
std::vector<int64_t> members_of(const std::vector<uint64_t>& words) {
  std::vector<int64_t> list;
  for (size_t w = 0; w < words.size(); ++w) {
    for (uint64_t word = words[w]; word != 0; word &= word - 1) {
      list.push_back(static_cast<int64_t>(w) * 64 + std::countr_zero(word));
    }
  }
  return list;
}

// Ascending numbers as few spans. A pair with a gap of its own stays two spans: the second may begin a longer one.
std::vector<Span> spans_of(const std::vector<int64_t>& numbers) {
  std::vector<Span> spans;
  for (size_t i = 0; i < numbers.size();) {
    size_t past = i + 1;
    int64_t stride = 1;
    if (past < numbers.size()) {
      stride = numbers[past] - numbers[i];
      while (past < numbers.size() && numbers[past] - numbers[past - 1] == stride) ++past;
      if (past - i == 2 && stride > 1 && past < numbers.size()) past = i + 1, stride = 1;
    }
    spans.push_back({numbers[i], past - i > 1 ? stride : 1, static_cast<int64_t>(past - i)});
    i = past;
  }
  return spans;
}

}  // namespace

bool RowBits::any() const {
  for (const auto& of_class : words) {
    for (const uint64_t word : of_class) {
      if (word != 0) return true;
    }
  }
  return false;
}

void RowBits::join(const RowBits& other) {
  for (size_t c = 0; c < words.size(); ++c) {
    for (size_t w = 0; w < words[c].size(); ++w) words[c][w] |= other.words[c][w];
  }
}

bool RowBits::includes(const RowBits& other) const {
  for (size_t c = 0; c < words.size(); ++c) {
    for (size_t w = 0; w < words[c].size(); ++w) {
      if (other.words[c][w] & ~words[c][w]) return false;
    }
  }
  return true;
}

Needs::Needs(const Pattern& pattern, const Layout& queries, const Layout& keys)
    : pattern_(pattern),
      queries_(queries),
      keys_(keys),
      parts_(static_cast<size_t>(queries.ranks())),
      parted_(static_cast<size_t>(queries.ranks())) {
  make_classes();
  constexpr double kMostBytes = 64e6;
  const double pairs = static_cast<double>(ranks()) * ranks();
  const double bytes =
      static_cast<double>(classes_.size()) * (static_cast<double>(keys.length) * ranks() / 8 + 48 * pairs);
  if (bytes < kMostBytes) found_.resize(static_cast<size_t>(pairs));
}

void Needs::make_classes() {
  // Slices differ in few products of batch rows and heads, however many slices there are.
  const auto key_of = [](const Slice& s) {
    return std::make_tuple(s.batch.begin, s.batch.stride, s.batch.count, s.heads.begin, s.heads.stride, s.heads.count);
  };
  std::map<decltype(key_of(Slice{})), size_t> numbers;
  std::vector<const Slice*> products;
  for (const Slice& s : pattern_.slices) {
    const auto [it, fresh] = numbers.emplace(key_of(s), products.size());
    if (fresh) products.push_back(&s);
    product_.push_back(it->second);
  }
  const AttentionShape& shape = pattern_.shape;
  const int64_t group = shape.heads / shape.kv_heads;
  const auto reads = [group](const Span& heads, int64_t kv) {  // some query head of this kv head
    return !heads.clip(kv * group, kv * group + group - 1).empty();
  };
  // Batch rows that are in the same products are alike; for these, kv heads that are in the same ones.
  const auto signature = [&](const auto& is_in) {
    std::vector<uint8_t> bits(products.size());
    for (size_t p = 0; p < products.size(); ++p) bits[p] = is_in(*products[p]);
    return bits;
  };
  std::map<std::vector<uint8_t>, std::vector<int64_t>> batch_groups;
  for (int64_t b = 0; b < shape.batch; ++b) {
    batch_groups[signature([&](const Slice& s) { return s.batch.contains(b); })].push_back(b);
  }
  for (const auto& [in_batch, batch_rows] : batch_groups) {
    std::map<std::vector<uint8_t>, std::vector<int64_t>> head_groups;
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      std::vector<uint8_t> bits = signature([&](const Slice& s) { return reads(s.heads, h); });
      for (size_t p = 0; p < bits.size(); ++p) bits[p] &= in_batch[p];
      head_groups[bits].push_back(h);
    }
    for (const auto& [bits, heads] : head_groups) {
      for (const Span& batch : spans_of(batch_rows)) {
        for (const Span& kv_heads : spans_of(heads)) classes_.push_back({batch, kv_heads, bits});
      }
    }
  }
}

const std::vector<QueryPart>& Needs::parts(int reader) {
  const size_t r = static_cast<size_t>(reader);
  if (!parted_[r]) {
    parted_[r] = true;
    for (const Slice& slice : pattern_.slices) {
      int64_t row = 0;
      for (const Span& owned : queries_.spans[r]) {
        const Span queries = intersect(slice.queries, owned);
        if (!queries.empty()) {
          const int64_t stride = queries.count > 1 ? queries.stride / owned.stride : 1;
          parts_[r].push_back({&slice, queries, {row + owned.index_of(queries.begin), stride, queries.count}});
        }
        row += owned.count;
      }
    }
  }
  return parts_[r];
}

RowBits Needs::none(int owner) const {
  const size_t words = static_cast<size_t>((keys_.count(owner) + 63) / 64);
  return {owner, std::vector<std::vector<uint64_t>>(classes_.size(), std::vector<uint64_t>(words))};
}

RowBits Needs::of(int owner, int reader) {
  if (found_.empty() || classes_.empty()) return find(owner, reader);
  RowBits& known = found_[static_cast<size_t>(owner) * static_cast<size_t>(ranks()) + static_cast<size_t>(reader)];
  if (known.words.empty()) known = find(owner, reader);
  return known;
}

RowBits Needs::find(int owner, int reader) {
  RowBits bits = none(owner);
  for (const QueryPart& part : parts(reader)) {
    const Slice& slice = *part.slice;
    const size_t product = product_[static_cast<size_t>(&slice - pattern_.slices.data())];
    // Keys that lie between the bands of two queries far apart meet none of them.
    const bool gaps = part.queries.count > 1 && !slice.band.unbounded_below() && !slice.band.unbounded_above() &&
                      slice.band.hi - slice.band.lo + 1 < part.queries.stride;
    int64_t row = 0;
    for (const Span& owned : keys_.spans[static_cast<size_t>(owner)]) {
      const auto take = [&](int64_t from, int64_t to) {  // keys of the slice in [from, to]
        if (owned.begin > to || owned.last() < from || slice.keys.begin > to || slice.keys.last() < from) return;
        const Span keys = intersect(slice.keys, owned).clip(from, to);
        if (keys.empty()) return;
        const int64_t stride = keys.count > 1 ? keys.stride / owned.stride : 1;
        for (size_t c = 0; c < classes_.size(); ++c) {
          if (classes_[c].in_product[product]) {
            set_bits(bits.words[c], row + owned.index_of(keys.begin), stride, keys.count);
          }
        }
      };
      if (gaps) {
        for (int64_t i = 0; i < part.queries.count; ++i) {
          take(part.queries.at(i) + slice.band.lo, part.queries.at(i) + slice.band.hi);
        }
      } else if (!slice.band.empty()) {
        take(part.queries.begin + slice.band.lo, part.queries.last() + slice.band.hi);
      }
      row += owned.count;
    }
  }
  return bits;
}

int64_t Needs::count(const RowBits& bits) const {
  int64_t n = 0;
  for (size_t c = 0; c < classes_.size(); ++c) {
    n += count_bits(bits.words[c]) * classes_[c].batch.count * classes_[c].heads.count;
  }
  return n;
}

bool Needs::complete(const RowBits& bits) const {
  return count(bits) == keys_.count(bits.owner) * pattern_.shape.batch * pattern_.shape.kv_heads;
}

RowSet Needs::all_rows(int owner) const {
  return {{{Span::range(0, pattern_.shape.batch), Span::range(0, pattern_.shape.kv_heads),
            keys_.spans[static_cast<size_t>(owner)]}}};
}

RowSet Needs::rows(const RowBits& bits) const {
  if (complete(bits)) return all_rows(bits.owner);
  const auto positions = [&](const std::vector<uint64_t>& words) {
    std::vector<Span> spans;
    const std::vector<int64_t> members = members_of(words);
    size_t next = 0;
    int64_t row = 0;
    for (const Span& owned : keys_.spans[static_cast<size_t>(bits.owner)]) {
      std::vector<int64_t> local;
      for (; next < members.size() && members[next] < row + owned.count; ++next) local.push_back(members[next] - row);
      for (const Span& s : spans_of(local)) {
        spans.push_back({owned.at(s.begin), s.count > 1 ? s.stride * owned.stride : 1, s.count});
      }
      row += owned.count;
    }
    return spans;
  };
  const bool alike =
      std::all_of(bits.words.begin(), bits.words.end(), [&](const auto& words) { return words == bits.words.front(); });
  RowSet set;
  for (size_t c = 0; c < (alike ? size_t{1} : classes_.size()); ++c) {
    RowBlock block{classes_[c].batch, classes_[c].heads, positions(bits.words[c])};
    if (alike)
      block.batch = Span::range(0, pattern_.shape.batch), block.heads = Span::range(0, pattern_.shape.kv_heads);
    if (block.rows() > 0) set.blocks.push_back(std::move(block));
  }
  return set;
}

}  // namespace annulus
