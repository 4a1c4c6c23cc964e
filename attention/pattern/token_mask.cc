// Makes masks of tokens; see token_mask.h.
#include "attention/pattern/token_mask.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "attention/pattern/checks.h"
#include "common/checksum.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int64_t kBlock = TokenMask::kBlock;
constexpr int64_t kWords = kBlock / 64;  // of a row of a block

// The bits of eight bytes: whether each is nonzero, the first in bit 0.
uint64_t nonzero_bytes(const uint8_t* bytes) {
  uint64_t x;
  std::memcpy(&x, bytes, sizeof x);
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
  const uint64_t high = (((x & kLow) + kLow) | x) & ~kLow;  // bit 7 of each byte that is nonzero
  return (high >> 7) * 0x0102040810204080 >> 56;
}

// Packs a row of `keys` bytes; bits beyond the keys are 0.
void pack_row(const uint8_t* shown, int64_t keys, std::vector<uint64_t>& words) {
  std::fill(words.begin(), words.end(), 0);
  int64_t key = 0;
  for (; key + 8 <= keys; key += 8) words[static_cast<size_t>(key / 64)] |= nonzero_bytes(shown + key) << (key % 64);
  for (; key < keys; ++key) words[static_cast<size_t>(key / 64)] |= uint64_t{shown[key] != 0} << (key % 64);
}

// The bits that are valid in word `w` of a row.
uint64_t valid_bits(int64_t w, int64_t keys) {
  const int64_t n = std::clamp<int64_t>(keys - 64 * w, 0, 64);
  return n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

void append_block(std::vector<BlockRun>& runs, size_t first, int64_t block) {
  if (runs.size() > first && runs.back().end == block) {
    ++runs.back().end;
  } else {
    runs.push_back({block, block + 1});
  }
}

// What is known of a plane without its bits.
struct Plane {
  std::vector<int64_t> whole_offsets = {0}, partial_offsets = {0};
  std::vector<BlockRun> whole, partial;
  std::string digest;
};

class MaskMaker {
 public:
  MaskMaker(TokenMask& mask, const MaskRows& rows)
      : mask_(mask), rows_(rows), packed_(static_cast<size_t>(ceil_div(mask.keys, kBlock) * kWords)) {}

  // Reads a plane, and finds its blocks.
  Plane look(int64_t number) {
    Plane plane;
    Checksum sum;
    std::vector<uint64_t> all(packed_.size()), any(packed_.size());
    for (int64_t first = 0; first < mask_.queries; first += kBlock) {
      std::fill(all.begin(), all.end(), ~uint64_t{0});
      std::fill(any.begin(), any.end(), 0);
      for_each_row(number, first, [&](int64_t query) {
        for (size_t w = 0; w < packed_.size(); ++w) all[w] &= packed_[w], any[w] |= packed_[w];
        sum.update(packed_.data(), packed_.size() * sizeof(uint64_t));
        note_distances(query);
      });
      const size_t whole_first = plane.whole.size(), partial_first = plane.partial.size();
      for (int64_t block = 0; block * kBlock < mask_.keys; ++block) {
        bool whole = true, shown = false;
        for (int64_t w = block * kWords; w < (block + 1) * kWords; ++w) {
          whole = whole && all[static_cast<size_t>(w)] == valid_bits(w, mask_.keys);
          shown = shown || any[static_cast<size_t>(w)] != 0;
        }
        if (shown) append_block(whole ? plane.whole : plane.partial, whole ? whole_first : partial_first, block);
      }
      plane.whole_offsets.push_back(static_cast<int64_t>(plane.whole.size()));
      plane.partial_offsets.push_back(static_cast<int64_t>(plane.partial.size()));
    }
    plane.digest = sum.hex();
    return plane;
  }

  // Reads the bits of the held queries of a plane. `number` is one of those that have this plane.
  void read_bits(int64_t plane, int64_t number, TokenMask::Stored& stored) {
    for (int64_t first = 0; first < mask_.queries; first += kBlock) {
      const auto row = static_cast<size_t>(plane * mask_.partial.query_blocks + first / kBlock);
      const auto begin = mask_.partial.runs.begin() + mask_.partial.offsets[row];
      const auto end = mask_.partial.runs.begin() + mask_.partial.offsets[row + 1];
      if (begin == end) continue;
      const int64_t past = std::min(first + kBlock, mask_.queries);
      const auto held = [&](int64_t query) { return stored.word_of[at(plane, query)] >= 0; };
      bool any = false;
      for (int64_t query = first; query < past; ++query) any = any || held(query);
      if (!any) continue;
      for_each_row(number, first, [&](int64_t query) {
        if (!held(query)) return;
        uint64_t* to = stored.words.data() + stored.word_of[at(plane, query)];
        for (auto run = begin; run != end; ++run) {
          to = std::copy(packed_.begin() + run->begin * kWords, packed_.begin() + run->end * kWords, to);
        }
      });
    }
  }

  size_t at(int64_t plane, int64_t query) const { return static_cast<size_t>(plane * mask_.queries + query); }

 private:
  // Calls visit(query) for the rows of the block of rows that begins with `first`, while packed_ has the row's bits.
  template <typename Visit>
  void for_each_row(int64_t number, int64_t first, Visit visit) {
    const int64_t count = std::min(kBlock, mask_.queries - first);
    const uint8_t* shown = rows_(number, first, count);
    for (int64_t i = 0; i < count; ++i, shown += mask_.keys) {
      pack_row(shown, mask_.keys, packed_);
      visit(first + i);
    }
  }

  void note_distances(int64_t query) {
    const auto shown = [](uint64_t word) { return word != 0; };
    const auto first = std::find_if(packed_.begin(), packed_.end(), shown);
    if (first == packed_.end()) return;
    const auto last = std::find_if(packed_.rbegin(), packed_.rend(), shown);
    mask_.nearest = std::min<int64_t>(mask_.nearest, (first - packed_.begin()) * 64 + std::countr_zero(*first) - query);
    mask_.farthest =
        std::max<int64_t>(mask_.farthest, (packed_.rend() - last) * 64 - 1 - std::countl_zero(*last) - query);
  }

  TokenMask& mask_;
  const MaskRows& rows_;
  std::vector<uint64_t> packed_;  // the bits of one row
};

void append_plane(BlockMap& map, const std::vector<int64_t>& offsets, const std::vector<BlockRun>& runs) {
  const auto before = static_cast<int64_t>(map.runs.size());
  for (size_t i = 1; i < offsets.size(); ++i) map.offsets.push_back(before + offsets[i]);
  map.runs.insert(map.runs.end(), runs.begin(), runs.end());
  ++map.heads;
}

// The words of a query's bits.
int64_t words_of_row(const TokenMask& mask, int64_t plane, int64_t query) {
  const auto row = static_cast<size_t>(plane * mask.partial.query_blocks + query / kBlock);
  int64_t n = 0;
  for (int64_t r = mask.partial.offsets[row]; r < mask.partial.offsets[row + 1]; ++r) {
    n += kWords * (mask.partial.runs[static_cast<size_t>(r)].end - mask.partial.runs[static_cast<size_t>(r)].begin);
  }
  return n;
}

// Which queries of each plane are held.
class HeldQueries {
 public:
  HeldQueries(const TokenMask& mask, const HeldBits& held) : mask_(mask), held_(held) {
    parts_of_.resize(static_cast<size_t>(mask.planes()), std::vector<bool>(held.parts.size()));
    for (size_t i = 0; i < held.parts.size(); ++i) {
      const auto [batch, heads, queries] = held.parts[i];
      for (int64_t b = 0; b < mask.batch; ++b) {
        for (int64_t h = 0; h < mask.heads; ++h) {
          const bool has = (mask.batch == 1 ? !batch.empty() : batch.contains(b)) &&
                           (mask.heads == 1 ? !heads.empty() : heads.contains(h));
          if (has) parts_of_[static_cast<size_t>(mask.plane_of[static_cast<size_t>(b * mask.heads + h)])][i] = true;
        }
      }
    }
  }

  // 1 for each query that is held.
  const std::vector<uint8_t>& of(int64_t plane) {
    const std::vector<bool>& parts = parts_of_[static_cast<size_t>(plane)];
    const auto [found, fresh] = known_.try_emplace(parts);
    if (!fresh) return found->second;
    found->second.assign(static_cast<size_t>(mask_.queries), held_.all ? 1 : 0);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i]) continue;
      for (const Span& span : held_.parts[i].queries) {
        for (int64_t j = 0; j < span.count; ++j) found->second[static_cast<size_t>(span.at(j))] = 1;
      }
    }
    return found->second;
  }

 private:
  const TokenMask& mask_;
  const HeldBits& held_;
  std::vector<std::vector<bool>> parts_of_;  // by plane, those of held_ that have it
  std::map<std::vector<bool>, std::vector<uint8_t>> known_;
};

bool any_held(const TokenMask& mask, const HeldBits& held) {
  const auto some = [](const HeldBits::Part& part) {
    return std::any_of(part.queries.begin(), part.queries.end(), [](const Span& s) { return !s.empty(); });
  };
  return !mask.partial.runs.empty() && (held.all || std::any_of(held.parts.begin(), held.parts.end(), some));
}

// Gives each held query its place among the words. Raises an error if there would be too many.
TokenMask::Stored placed_words(const TokenMask& mask, const std::string& where) {
  require_mask_limit(mask, mask.held, where);
  TokenMask::Stored stored;
  if (!any_held(mask, mask.held)) return stored;
  HeldQueries held(mask, mask.held);
  int64_t next = 0;
  stored.word_of.assign(static_cast<size_t>(mask.planes() * mask.queries), -1);
  for (int64_t plane = 0; plane < mask.planes(); ++plane) {
    const std::vector<uint8_t>& queries = held.of(plane);
    for (int64_t query = 0; query < mask.queries; ++query) {
      if (!queries[static_cast<size_t>(query)]) continue;
      stored.word_of[static_cast<size_t>(plane * mask.queries + query)] = next;
      next += words_of_row(mask, plane, query);
    }
  }
  stored.words.resize(static_cast<size_t>(next));
  return stored;
}

std::atomic<int64_t> set_limit = -1;

}  // namespace

HeldBits HeldBits::of(std::vector<Span> queries) {
  const Span every = Span::range(0, int64_t{1} << 40);
  return {false, {{every, every, std::move(queries)}}};
}

std::string HeldBits::text() const {
  std::string text = all ? "all" : "";
  for (const Part& part : parts) {
    text += "batch rows " + to_string(part.batch) + ", heads " + to_string(part.heads) + ":";
    for (const Span& span : part.queries) text += " " + to_string(span);
    text += ";";
  }
  return text;
}

void require_mask_limit(const TokenMask& mask, const HeldBits& rows, const std::string& where) {
  const int64_t bytes = mask.bytes_of_bits(rows), limit = mask_limit();
  if (bytes <= limit) return;
  throw Error(ErrorKind::kResource, "pattern",
              where + " has partly shown blocks whose bits would take " + bytes_text(static_cast<double>(bytes)) +
                  " on this rank, but a mask may take " + bytes_text(static_cast<double>(limit)) +
                  "; set memory.masks or ANNULUS_MASKS_MIB to " + std::to_string(ceil_div(bytes, int64_t{1} << 20)) +
                  " (MiB) or more, or use more ranks: each holds the bits of the queries that it owns or computes");
}

std::optional<int64_t> TokenMask::query_without_bits(const HeldBits::Part& rows) const {
  if (held.all) return std::nullopt;
  const auto includes = [](const Span& all, const Span& some, bool one) {
    return one ? !all.empty() : intersect(all, some).count == some.count;
  };
  std::vector<Span> found;
  for (const HeldBits::Part& part : held.parts) {
    if (!includes(part.batch, rows.batch, batch == 1) || !includes(part.heads, rows.heads, heads == 1)) continue;
    found.insert(found.end(), part.queries.begin(), part.queries.end());
  }
  for (const Span& span : rows.queries) {
    for (int64_t i = 0; i < span.count; ++i) {
      const auto has = [&](const Span& some) { return some.contains(span.at(i)); };
      if (std::none_of(found.begin(), found.end(), has)) return span.at(i);
    }
  }
  return std::nullopt;
}

MaskBits TokenMask::bits(int64_t plane, int64_t query, int64_t key) const {
  const auto row = static_cast<size_t>(plane * partial.query_blocks + query / kBlock);
  const int64_t block = key / kBlock,
                word = stored->word_of.empty() ? -1 : stored->word_of[static_cast<size_t>(plane * queries + query)];
  if (word < 0) return {};
  int64_t before = 0;  // words of the runs before the one with the key
  for (int64_t r = partial.offsets[row]; r < partial.offsets[row + 1]; ++r) {
    const BlockRun& run = partial.runs[static_cast<size_t>(r)];
    if (block < run.begin) break;
    if (block < run.end) return {stored->words.data() + word + before, run.begin * kBlock};
    before += kWords * (run.end - run.begin);
  }
  throw Error(ErrorKind::kInternal, "pattern",
              "query " + std::to_string(query) + " and key " + std::to_string(key) +
                  " are in no partly shown block of plane " + std::to_string(plane));
}

int64_t TokenMask::bytes() const {
  return static_cast<int64_t>(sizeof *this + plane_of.capacity() * sizeof(int64_t) +
                              (stored->word_of.capacity() + stored->words.capacity()) * sizeof(uint64_t)) +
         whole.bytes() + partial.bytes();
}

int64_t TokenMask::bytes_holding(const HeldBits& rows) const {
  const auto here = static_cast<int64_t>((stored->word_of.capacity() + stored->words.capacity()) * sizeof(int64_t));
  return bytes() - here + bytes_of_bits(rows);
}

// With the places at which the bits are found.
int64_t TokenMask::bytes_of_bits(const HeldBits& rows) const {
  if (!any_held(*this, rows)) return 0;
  HeldQueries held_queries(*this, rows);
  int64_t n = planes() * queries;
  for (int64_t plane = 0; plane < planes(); ++plane) {
    const std::vector<uint8_t>& of_plane = held_queries.of(plane);
    for (int64_t first = 0; first < queries; first += kBlock) {
      const auto begin = of_plane.begin() + first, end = of_plane.begin() + std::min(first + kBlock, queries);
      n += std::count(begin, end, 1) * words_of_row(*this, plane, first);
    }
  }
  return 8 * n;
}

TokenMask TokenMask::of_batch_rows(int64_t first, int64_t count) const {
  TokenMask part = *this;
  part.batch = count;
  const auto begin = plane_of.begin() + first * heads;
  part.plane_of.assign(begin, begin + count * heads);
  for (HeldBits::Part& rows : part.held.parts) {
    rows.batch = rows.batch.clip(first, first + count - 1);
    rows.batch.begin = rows.batch.empty() ? 0 : rows.batch.begin - first;
  }
  const std::string text = digest + " " + std::to_string(first) + " " + std::to_string(count);
  part.digest = checksum(text.data(), text.size());
  return part;
}

TokenMask make_token_mask(int64_t batch, int64_t heads, int64_t queries, int64_t keys, const MaskRows& rows,
                          const HeldBits& held, const std::string& where) {
  TokenMask mask;
  mask.batch = batch, mask.heads = heads, mask.queries = queries, mask.keys = keys;
  mask.held = held;
  mask.nearest = std::numeric_limits<int64_t>::max(), mask.farthest = std::numeric_limits<int64_t>::min();
  for (BlockMap* map : {&mask.whole, &mask.partial}) {
    *map = {kBlock, 1, 0, ceil_div(queries, kBlock), ceil_div(keys, kBlock), {0}, {}};
  }
  MaskMaker maker(mask, rows);
  Checksum sum;
  for (const int64_t size : {batch, heads, queries, keys}) sum.update(&size, sizeof size);
  std::map<std::string, int64_t> known;
  std::vector<int64_t> first_with;  // for each plane
  for (int64_t number = 0; number < batch * heads; ++number) {
    const Plane plane = maker.look(number);
    sum.update(plane.digest.data(), plane.digest.size());
    const auto [found, fresh] = known.emplace(plane.digest, mask.planes());
    mask.plane_of.push_back(found->second);
    if (!fresh) continue;
    first_with.push_back(number);
    append_plane(mask.whole, plane.whole_offsets, plane.whole);
    append_plane(mask.partial, plane.partial_offsets, plane.partial);
  }
  mask.digest = sum.hex();
  if (mask.whole.runs.empty() && mask.partial.runs.empty() && batch * heads * queries * keys > 0) {
    refuse_plan(where +
                " shows no pair, so no query would see a key: true, or nonzero, stands for pairs that are seen");
  }
  TokenMask::Stored stored = placed_words(mask, where);
  for (int64_t plane = 0; !stored.word_of.empty() && plane < mask.planes(); ++plane) {
    maker.read_bits(plane, first_with[static_cast<size_t>(plane)], stored);
  }
  mask.stored = std::make_shared<const TokenMask::Stored>(std::move(stored));
  return mask;
}

TokenMask token_mask_from_dense(const uint8_t* shown, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
  const MaskRows rows = [=](int64_t number, int64_t first, int64_t) {
    return shown + (number * queries + first) * keys;
  };
  return make_token_mask(batch, heads, queries, keys, rows, HeldBits::everything(), "the mask");
}

int64_t mask_limit() {
  if (set_limit < 0) {
    int64_t none = -1;
    set_limit.compare_exchange_strong(none, memory_from_environment("ANNULUS_MASKS_MIB", int64_t{1} << 30));
  }
  return set_limit;
}

void set_mask_limit(int64_t bytes) { set_limit = bytes; }

}  // namespace annulus
