// Finds which rows ranks need of each other; see needs.h.
#include "attention/plan/needs.h"

#include <algorithm>
#include <limits>
#include <map>
#include <span>
#include <tuple>

#include "attention/plan/bits.h"

namespace annulus {
namespace {

// Writes ascending ranges of numbers as few spans (for_each_span in bits.h).
std::vector<Span> spans_of(const std::vector<Span>& ranges) {
  std::vector<Span> spans;
  if (ranges.empty()) return spans;
  const int64_t past = ranges.back().last() + 1;
  std::vector<uint64_t> words(static_cast<size_t>((past + 63) / 64));
  for (const Span& range : ranges) set_bits(words, range.begin, 1, range.count);
  for_each_span(words, 0, past, [&](const Span& s) { spans.push_back(s); });
  return spans;
}

// Cuts the numbers 0, ..., count - 1 into ranges such that all numbers of a range lie in the same ones of `spans`. The
// number n stands for the members n * group, ..., n * group + group - 1. The number of ranges depends on the spans, not
// on `count`.
std::vector<Span> ranges_alike(int64_t count, int64_t group, const std::vector<Span>& spans) {
  std::vector<int64_t> ends = {0, count};
  for (const Span& span : spans) {
    if (span.empty()) continue;
    const bool gaps = span.stride > group;  // whole groups may lie between two members
    for (int64_t i = 0; i < (gaps ? span.count : 1); ++i) {
      ends.push_back(span.at(i) / group);
      ends.push_back((gaps ? span.at(i) : span.last()) / group + 1);
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  std::vector<Span> ranges;
  for (size_t i = 0; i + 1 < ends.size() && ends[i + 1] <= count; ++i) {
    ranges.push_back(Span::range(ends[i], ends[i + 1]));
  }
  return ranges;
}

// Calls visit(first, count) for the members first, ..., first + count - 1 of `keys`, by index, that meet some query
// within the band. Keys that lie between the bands of two distant queries meet neither and are left out.
template <typename Visit>
void for_each_met(const Band& band, const Span& queries, const Span& keys, Visit visit) {
  if (keys.empty() || band.empty()) return;
  const Span near = queries.clip(keys.begin - band.hi, keys.last() - band.lo);
  if (near.empty()) return;
  const auto take = [&](int64_t from, int64_t to) {
    const int64_t first = from <= keys.begin ? 0 : ceil_div(from - keys.begin, keys.stride);
    const int64_t past = to >= keys.last() ? keys.count : floor_div(to - keys.begin, keys.stride) + 1;
    if (first < past) visit(first, past - first);
  };
  if (near.count > 1 && band.hi - band.lo + 1 < near.stride) {
    for (int64_t i = 0; i < near.count; ++i) take(near.at(i) + band.lo, near.at(i) + band.hi);
  } else {
    take(near.begin + band.lo, near.last() + band.hi);
  }
}

// Whether no member of `queries` can meet one of `keys` within the band, judged by the ends of the spans alone.
bool apart(const Band& band, const Span& queries, const Span& keys) {
  return queries.last() < keys.begin - band.hi || queries.begin > keys.last() - band.lo;
}

// The keys of a slice that one rank holds in one of its spans, and the rows in which they are stored.
struct HeldKeys {
  Span keys;
  int64_t first_row = 0, stride = 1;

  HeldKeys(const Slice& slice, const Span& owned, int64_t row) : keys(intersect(slice.keys, owned)) {
    if (keys.empty()) return;
    first_row = row + owned.index_of(keys.begin);
    if (keys.count > 1) stride = keys.stride / owned.stride;
  }
};

int64_t earliest_key(const Slice& s, const Span& queries) { return std::max(s.keys.begin, queries.begin + s.band.lo); }
int64_t latest_key(const Slice& s, const Span& queries) { return std::min(s.keys.last(), queries.last() + s.band.hi); }

}  // namespace

bool RowBits::any() const {
  return std::any_of(words.begin(), words.end(), [](uint64_t word) { return word != 0; });
}

void RowBits::join(const RowBits& other) {
  if (words.empty()) words.resize(other.words.size());
  for (size_t w = 0; w < other.words.size(); ++w) words[w] |= other.words[w];
}

Needs::Needs(const Pattern& pattern, const Layout& queries, const Layout& keys)
    : pattern_(pattern), queries_(queries), keys_(keys), query_holders_(queries), key_holders_(keys) {
  make_classes();
}

void Needs::make_classes() {
  // However many slices there are, they have few different products of batch rows and heads.
  const auto key_of = [](const Slice& s) {
    return std::make_tuple(s.batch.begin, s.batch.stride, s.batch.count, s.heads.begin, s.heads.stride, s.heads.count);
  };
  std::map<decltype(key_of(Slice{})), uint32_t> numbers;
  std::vector<const Slice*> products;
  product_.reserve(pattern_.slices.size());
  const Slice* before = nullptr;
  for (const Slice& s : pattern_.slices) {
    if (before && before->batch == s.batch && before->heads == s.heads) {
      product_.push_back(product_.back());
    } else {
      const auto [it, fresh] = numbers.emplace(key_of(s), static_cast<uint32_t>(products.size()));
      if (fresh) products.push_back(&s);
      product_.push_back(it->second);
    }
    before = &s;
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
  classes_of_product_.resize(products.size());
  std::vector<Span> batches, head_spans;
  for (const Slice* product : products) {
    batches.push_back(product->batch);
    head_spans.push_back(product->heads);
  }
  std::map<std::vector<uint8_t>, std::vector<Span>> batch_groups;
  for (const Span& rows : ranges_alike(shape.batch, 1, batches)) {
    batch_groups[signature([&](const Slice& s) { return s.batch.contains(rows.begin); })].push_back(rows);
  }
  const std::vector<Span> kv_ranges = ranges_alike(shape.kv_heads, group, head_spans);
  for (const auto& [in_batch, batch_rows] : batch_groups) {
    std::map<std::vector<uint8_t>, std::vector<Span>> head_groups;
    for (const Span& range : kv_ranges) {
      std::vector<uint8_t> bits = signature([&](const Slice& s) { return reads(s.heads, range.begin); });
      for (size_t p = 0; p < bits.size(); ++p) bits[p] &= in_batch[p];
      head_groups[bits].push_back(range);
    }
    for (const auto& [bits, heads] : head_groups) {
      for (const Span& batch : spans_of(batch_rows)) {
        for (const Span& kv_heads : spans_of(heads)) {
          for (size_t p = 0; p < products.size(); ++p) {
            if (bits[p]) classes_of_product_[p].push_back(static_cast<uint32_t>(classes_.size()));
          }
          classes_.push_back({batch, kv_heads});
        }
      }
    }
  }
}

const Lists& Needs::readers_by_slice() {
  if (!readers_by_slice_) {
    readers_by_slice_.emplace();
    std::vector<uint32_t> holders;
    for (const Slice& slice : pattern_.slices) {
      const Span keys = slice.keys;
      if (keys.empty() || slice.band.empty()) {
        holders.clear();
      } else {
        query_holders_.find(slice.queries, keys.begin - slice.band.hi, keys.last() - slice.band.lo, holders);
      }
      readers_by_slice_->push_back(holders);
    }
  }
  return *readers_by_slice_;
}

const Lists& Needs::slices_by_reader() {
  if (!slices_by_reader_) slices_by_reader_ = readers_by_slice().transposed(static_cast<size_t>(ranks()));
  return *slices_by_reader_;
}

const Lists& Needs::slices_by_owner() {
  if (!slices_by_owner_) {
    Lists owners;
    std::vector<uint32_t> holders;
    for (const Slice& slice : pattern_.slices) {
      if (slice.queries.empty() || slice.keys.empty() || slice.band.empty()) {
        holders.clear();
      } else {
        key_holders_.find(slice.keys, earliest_key(slice, slice.queries), latest_key(slice, slice.queries), holders);
      }
      owners.push_back(holders);
    }
    slices_by_owner_ = owners.transposed(static_cast<size_t>(ranks()));
  }
  return *slices_by_owner_;
}

std::vector<QueryPart> Needs::parts(int reader) {
  std::vector<QueryPart> parts;
  for (const uint32_t number : slices_by_reader().of(static_cast<size_t>(reader))) {
    const Slice& slice = pattern_.slices[number];
    int64_t row = 0;
    for (const Span& owned : queries_.spans[static_cast<size_t>(reader)]) {
      const Span queries = intersect(slice.queries, owned);
      if (!queries.empty()) {
        const int64_t stride = queries.count > 1 ? queries.stride / owned.stride : 1;
        parts.push_back({&slice, queries, {row + owned.index_of(queries.begin), stride, queries.count}});
      }
      row += owned.count;
    }
  }
  return parts;
}

Lists Needs::by_owner(const std::vector<QueryPart>& parts) const {
  Lists owners;
  std::vector<uint32_t> holders;
  for (const QueryPart& part : parts) {
    key_holders_.find(part.slice->keys, earliest_key(*part.slice, part.queries), latest_key(*part.slice, part.queries),
                      holders);
    owners.push_back(holders);
  }
  return owners.transposed(static_cast<size_t>(ranks()));
}

void Needs::mark(RowBits& bits, const Slice& slice, int64_t first_row, int64_t stride, int64_t count) const {
  const size_t words = words_of(bits.owner);
  if (bits.words.empty()) bits.words.resize(words * classes_.size());
  for (const uint32_t c : classes_of(slice)) {
    set_bits(std::span(bits.words).subspan(c * words, words), first_row, stride, count);
  }
}

std::vector<RowBits> Needs::read_by(int reader) {
  std::vector<RowBits> read(static_cast<size_t>(ranks()));
  for (int owner = 0; owner < ranks(); ++owner) read[static_cast<size_t>(owner)].owner = owner;
  for (const QueryPart& part : parts(reader)) {
    const Slice& slice = *part.slice;
    if (slice.keys.empty()) continue;
    key_holders_.for_each(
        earliest_key(slice, part.queries), latest_key(slice, part.queries), [&](const Holders::Held& held) {
          const HeldKeys of(slice, held.span, held.row);
          for_each_met(slice.band, part.queries, of.keys, [&](int64_t first, int64_t count) {
            mark(read[static_cast<size_t>(held.rank)], slice, of.first_row + first * of.stride, of.stride, count);
          });
        });
  }
  return read;
}

std::vector<RowBits> Needs::read_of(int owner) {
  std::vector<RowBits> read(static_cast<size_t>(ranks()));
  for (RowBits& bits : read) bits.owner = owner;
  for (const uint32_t number : slices_by_owner().of(static_cast<size_t>(owner))) {
    const Slice& slice = pattern_.slices[number];
    int64_t row = 0;
    for (const Span& owned : keys_.spans[static_cast<size_t>(owner)]) {
      const HeldKeys of(slice, owned, row);
      row += owned.count;
      if (of.keys.empty()) continue;
      for (const uint32_t reader : readers_by_slice().of(number)) {
        for (const Span& span : queries_.spans[reader]) {
          if (span.empty() || apart(slice.band, span, of.keys)) continue;
          for_each_met(slice.band, intersect(slice.queries, span), of.keys, [&](int64_t first, int64_t count) {
            mark(read[reader], slice, of.first_row + first * of.stride, of.stride, count);
          });
        }
      }
    }
  }
  return read;
}

__int128 Needs::foreign_rows() {
  // The positions that one reader's queries meet, as bits, for each class; and the range of words that may not be 0.
  std::vector<std::vector<uint64_t>> met(classes_.size());
  std::vector<std::pair<size_t, size_t>> touched(classes_.size());
  __int128 rows = 0;
  for (int reader = 0; reader < ranks(); ++reader) {
    for (const QueryPart& part : parts(reader)) {
      const Slice& slice = *part.slice;
      for_each_met(slice.band, part.queries, slice.keys, [&](int64_t first, int64_t count) {
        const Span keys = slice.keys.sub(first, count);
        const size_t from = static_cast<size_t>(keys.begin / 64), past = static_cast<size_t>(keys.last() / 64) + 1;
        for (const uint32_t c : classes_of(slice)) {
          if (met[c].empty()) met[c].resize(static_cast<size_t>((keys_.length + 63) / 64));
          auto& [begin, end] = touched[c];
          begin = end == 0 ? from : std::min(begin, from);
          end = std::max(end, past);
          set_bits(met[c], keys.begin, keys.stride, count);
        }
      });
    }
    for (size_t c = 0; c < classes_.size(); ++c) {
      auto& [begin, end] = touched[c];
      if (end == 0) continue;
      int64_t positions = 0;
      for (const Span& own : keys_.spans[static_cast<size_t>(reader)]) positions -= count_bits(met[c], own);
      const std::span<uint64_t> words = std::span(met[c]).subspan(begin, end - begin);
      positions += count_bits(words);
      std::fill(words.begin(), words.end(), 0);
      begin = end = 0;
      rows += __int128{positions} * classes_[c].batch.count * classes_[c].heads.count;
    }
  }
  return rows;
}

Reach Needs::find_reach(int owner) {
  const size_t rows = static_cast<size_t>(keys_.count(owner));
  constexpr int kNone = std::numeric_limits<int>::max();
  std::vector<int> firsts(rows * classes_.size(), kNone), lasts(rows * classes_.size(), 0);

  // Enters the visits of a slice's readers for the keys in one span, in the order of the ring (direction 1) or against
  // it (-1). So the first entry of a row is its first visit (direction 1) or its last (-1). One interval of keys that
  // have been entered is remembered, and keys that fall into it again are skipped, so few readers are looked at
  // closely.
  const auto enter = [&](const Slice& slice, std::span<const uint32_t> readers, const HeldKeys& of, int direction) {
    const size_t n = readers.size();
    const size_t ahead = static_cast<size_t>(
        std::upper_bound(readers.begin(), readers.end(), static_cast<uint32_t>(owner)) - readers.begin());
    int64_t begin = 0, past = 0;  // the interval of entered keys
    for (size_t j = 0; j < n && past - begin < of.keys.count; ++j) {
      const uint32_t reader = readers[(direction > 0 ? ahead + j : ahead + n - 1 - j) % n];
      if (static_cast<int>(reader) == owner) continue;
      const int visit = (static_cast<int>(reader) - owner + ranks()) % ranks();
      for (const Span& span : queries_.spans[reader]) {
        if (span.empty() || apart(slice.band, span, of.keys)) continue;
        for_each_met(slice.band, intersect(slice.queries, span), of.keys, [&](int64_t first, int64_t count) {
          if (first >= begin && first + count <= past) return;
          for (const uint32_t c : classes_of(slice)) {
            int* list = (direction > 0 ? firsts : lasts).data() + c * rows + of.first_row + first * of.stride;
            for (int64_t i = 0; i < count; ++i, list += of.stride) {
              *list = direction > 0 ? std::min(*list, visit) : std::max(*list, visit);
            }
          }
          if (past == begin) {
            begin = first, past = first + count;
          } else if (first <= past && first + count >= begin) {
            begin = std::min(begin, first), past = std::max(past, first + count);
          }
        });
      }
    }
  };
  for (const uint32_t number : slices_by_owner().of(static_cast<size_t>(owner))) {
    const Slice& slice = pattern_.slices[number];
    const std::span<const uint32_t> readers = readers_by_slice().of(number);
    int64_t row = 0;
    for (const Span& owned : keys_.spans[static_cast<size_t>(owner)]) {
      const HeldKeys of(slice, owned, row);
      row += owned.count;
      if (of.keys.empty()) continue;
      enter(slice, readers, of, 1);
      enter(slice, readers, of, -1);
    }
  }

  Reach reach;
  std::vector<uint8_t> first_occurs(static_cast<size_t>(ranks())), last_occurs(static_cast<size_t>(ranks()));
  for (size_t c = 0; c < classes_.size(); ++c) {
    std::vector<Reach::Run>& runs = reach.runs.emplace_back();
    for (size_t i = c * rows; i < (c + 1) * rows; ++i) {
      const int first = firsts[i] == kNone ? 0 : firsts[i];
      if (runs.empty() || runs.back().first != first || runs.back().last != lasts[i]) {
        runs.push_back({0, first, lasts[i]});
        first_occurs[static_cast<size_t>(first)] = last_occurs[static_cast<size_t>(lasts[i])] = 1;
      }
      ++runs.back().rows;
    }
    runs.shrink_to_fit();
  }
  for (int visit = 1; visit < ranks(); ++visit) {
    if (first_occurs[static_cast<size_t>(visit)]) reach.firsts.push_back(visit);
    if (last_occurs[static_cast<size_t>(visit)]) reach.lasts.push_back(visit);
  }
  return reach;
}

Reach& Needs::reach(int owner) {
  const auto bytes_of = [](const Reach& found) {
    int64_t bytes = static_cast<int64_t>(sizeof found + (found.firsts.size() + found.lasts.size()) * sizeof(int));
    for (const auto& runs : found.runs) bytes += static_cast<int64_t>(sizeof runs + runs.size() * sizeof(Reach::Run));
    return bytes;
  };
  return reaches_.get(
      owner, [&] { return find_reach(owner); }, bytes_of);
}

RowSet Needs::needed_on_the_way(int owner, int first, int past) {
  Reach& reach = this->reach(owner);
  const bool from_the_start = first == 1;
  const auto border = [](const std::vector<int>& visits, int visit) {
    return std::lower_bound(visits.begin(), visits.end(), visit);
  };
  const int64_t number = from_the_start ? border(reach.firsts, past) - reach.firsts.begin()
                                        : reach.lasts.end() - border(reach.lasts, first);
  if (number == 0) return {};
  const int64_t key = from_the_start ? -number : number;
  for (const auto& [known, rows] : reach.remembered) {
    if (known == key) return rows;
  }
  RowBits bits{owner, std::vector<uint64_t>(words_of(owner) * classes_.size())};
  for (size_t c = 0; c < classes_.size(); ++c) {
    const std::span<uint64_t> words = std::span(bits.words).subspan(c * words_of(owner), words_of(owner));
    int64_t row = 0;
    for (const Reach::Run& run : reach.runs[c]) {
      if (from_the_start ? run.first > 0 && run.first < past : run.last >= first) set_bits(words, row, 1, run.rows);
      row += run.rows;
    }
  }
  // A program uses two consecutive numbers of visits in each direction, and the program of the next rank shares some of
  // them.
  constexpr size_t kRemembered = 4;
  if (reach.remembered.size() == kRemembered) reach.remembered.erase(reach.remembered.begin());
  reach.remembered.emplace_back(key, rows(bits));
  return reach.remembered.back().second;
}

std::pair<int, int> Needs::first_and_last_visit(int owner) {
  const Reach& of = reach(owner);
  return of.firsts.empty() ? std::pair{0, 0} : std::pair{of.firsts.front(), of.lasts.back()};
}

bool Needs::last_visit_needs_all(int owner) {
  for (const auto& runs : reach(owner).runs) {
    for (const Reach::Run& run : runs) {
      if (run.first > 0 && run.last < ranks() - 1) return false;
    }
  }
  return true;
}

int64_t Needs::count(const RowBits& bits) const {
  if (bits.words.empty()) return 0;
  const size_t words = words_of(bits.owner);
  int64_t n = 0;
  for (size_t c = 0; c < classes_.size(); ++c) {
    n +=
        count_bits(std::span(bits.words).subspan(c * words, words)) * classes_[c].batch.count * classes_[c].heads.count;
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
  if (bits.words.empty()) return {};
  const size_t words = words_of(bits.owner);
  const auto of_class = [&](size_t c) { return std::span(bits.words).subspan(c * words, words); };
  const auto positions = [&](std::span<const uint64_t> of) {
    std::vector<Span> spans;
    int64_t row = 0;
    for (const Span& owned : keys_.spans[static_cast<size_t>(bits.owner)]) {
      for_each_span(of, row, row + owned.count, [&](const Span& s) {
        spans.push_back({owned.at(s.begin - row), s.count > 1 ? s.stride * owned.stride : 1, s.count});
      });
      row += owned.count;
    }
    return spans;
  };
  bool alike = true;
  for (size_t c = 1; c < classes_.size() && alike; ++c) {
    alike = std::equal(of_class(c).begin(), of_class(c).end(), of_class(0).begin());
  }
  RowSet set;
  for (size_t c = 0; c < (alike ? size_t{1} : classes_.size()); ++c) {
    RowBlock block{classes_[c].batch, classes_[c].heads, positions(of_class(c))};
    if (alike)
      block.batch = Span::range(0, pattern_.shape.batch), block.heads = Span::range(0, pattern_.shape.kv_heads);
    if (block.rows() > 0) set.blocks.push_back(std::move(block));
  }
  return set;
}

}  // namespace annulus
