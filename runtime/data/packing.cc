// See packing.h.
#include "runtime/data/packing.h"

#include <algorithm>
#include <bit>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

// A set of numbers below n that finds the next one in a few steps: a tree whose nodes have 64 children.
class NumberSet {
 public:
  explicit NumberSet(size_t n) {
    do levels_.emplace_back(n = n / 64 + 1);
    while (n > 1);
  }

  void insert(size_t i) {
    for (auto& level : levels_) {
      level[i / 64] |= uint64_t{1} << i % 64;
      i /= 64;
    }
  }

  void erase(size_t i) {
    for (auto& level : levels_) {
      if ((level[i / 64] &= ~(uint64_t{1} << i % 64)) != 0) return;
      i /= 64;
    }
  }

  // The smallest member that is at least i; npos if there is none.
  static constexpr size_t npos = SIZE_MAX;
  size_t next(size_t i) const {
    for (size_t l = 0; l < levels_.size(); ++l) {
      const size_t word = i / 64;
      if (word >= levels_[l].size()) return npos;
      const uint64_t rest = levels_[l][word] >> i % 64;
      if (rest == 0) {
        i = word + 1;
        continue;
      }
      i += static_cast<size_t>(std::countr_zero(rest));
      while (l > 0) i = i * 64 + static_cast<size_t>(std::countr_zero(levels_[--l][i]));
      return i;
    }
    return npos;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

}  // namespace

std::string_view packing_name(Packing packing) {
  constexpr std::string_view kNames[] = {"stream", "best-fit", "document"};
  return kNames[static_cast<size_t>(packing)];
}

Packing packing_named(std::string_view name) {
  for (const Packing packing : {Packing::kStream, Packing::kBestFit, Packing::kDocument}) {
    if (packing_name(packing) == name) return packing;
  }
  throw Error(ErrorKind::kInternal, "data", "there is no packing " + std::string(name));
}

std::string PackSettings::text() const {
  return "context=" + std::to_string(context) + " packing=" + std::string(packing_name(packing)) +
         " documents=" + (units_are_documents() ? "1" : "0") + " validation=" + exact(validation_fraction) +
         " refuse_long=" + (refuse_long ? "1" : "0");
}

std::string PackSettings::words() const {
  return "rows of " + with_commas(context) + " tokens, " + std::string(packing_name(packing)) +
         (units_are_documents() ? ", documents apart" : ", documents end to end") +
         (validation_fraction > 0 ? ", " + exact(validation_fraction) + " held out" : "");
}

// Best fit by the room that bins have left: the fullest bin with room for a piece takes it; of several, the newest.
struct Packer::Bins {
  explicit Bins(int64_t context) : rooms(static_cast<size_t>(context)), newest(static_cast<size_t>(context), -1) {}

  NumberSet rooms;              // the amounts of room that bins have left
  std::vector<int32_t> newest;  // the newest bin with each amount; -1: none
  std::vector<int32_t> older;   // for each bin, the next older one with the same room
  std::vector<uint64_t> order;
  std::vector<int32_t> bin_of;    // by piece
  std::vector<int64_t> begin_of;  // by bin: where its pieces begin in `placed`
  std::vector<int32_t> placed;

  // Takes the fullest bin with this much room out of the set; -1: there is none.
  int32_t take(size_t count, size_t& room) {
    room = rooms.next(count);
    if (room == NumberSet::npos) return -1;
    const int32_t bin = newest[room];
    newest[room] = older[static_cast<size_t>(bin)];
    if (newest[room] < 0) rooms.erase(room);
    return bin;
  }

  void put(int32_t bin, size_t room) {
    if (newest[room] < 0) rooms.insert(room);
    older[static_cast<size_t>(bin)] = newest[room];
    newest[room] = bin;
  }

  void clear() {
    for (size_t room = 0; (room = rooms.next(room)) != NumberSet::npos;) {
      rooms.erase(room);
      newest[room] = -1;
    }
    older.clear();
  }
};

Packer::Packer(Packing packing, int64_t context, Sink& sink) : packing_(packing), context_(context), sink_(sink) {
  if (context < 1) throw Error(ErrorKind::kInternal, "data", "the context was not checked");
}

Packer::~Packer() = default;

void Packer::add(int64_t token, int64_t positions) {
  if (positions < 1) return;
  targets_ += positions;
  const auto row = [&](int64_t at, int64_t count) {
    sink_.add({static_cast<uint64_t>(at), static_cast<uint64_t>(rows_++ * context_), static_cast<uint64_t>(count)});
  };
  if (packing_ == Packing::kStream) {
    sink_.add({static_cast<uint64_t>(token), static_cast<uint64_t>(place_), static_cast<uint64_t>(positions)});
    place_ += positions;
    rows_ = (place_ + context_ - 1) / context_;
  } else {
    for (; positions >= context_; token += context_, positions -= context_) row(token, context_);
    if (positions > 0 && packing_ == Packing::kDocument) row(token, positions);
    if (positions > 0 && packing_ == Packing::kBestFit) window_.push_back({token, positions});
  }
  if (++documents_ == kWindow) end_window();
}

void Packer::finish() {
  if (documents_ > 0) end_window();
}

void Packer::end_window() {
  if (!window_.empty()) pack_window();
  window_.clear();
  documents_ = 0;
  sink_.end_window();
}

void Packer::pack_window() {
  if (!bins_) bins_ = std::make_unique<Bins>(context_);
  Bins& b = *bins_;
  // By falling length; equal ones in the order of the source.
  static_assert(kWindow <= 1 << 16);
  b.order.clear();
  for (size_t i = 0; i < window_.size(); ++i) {
    b.order.push_back(static_cast<uint64_t>(context_ - window_[i].count) << 16 | i);
  }
  std::sort(b.order.begin(), b.order.end());
  b.bin_of.resize(window_.size());
  for (const uint64_t key : b.order) {
    const size_t i = key & 0xffff;
    const auto count = static_cast<size_t>(window_[i].count);
    size_t room = 0;
    int32_t bin = b.take(count, room);
    if (bin < 0) {
      bin = static_cast<int32_t>(b.older.size());
      b.older.push_back(-1);
      room = static_cast<size_t>(context_);
    }
    b.bin_of[i] = bin;
    b.put(bin, room - count);
  }
  // A bin's pieces in the order of the source.
  b.begin_of.assign(b.older.size() + 1, 0);
  for (const int32_t bin : b.bin_of) ++b.begin_of[static_cast<size_t>(bin) + 1];
  for (size_t bin = 1; bin < b.begin_of.size(); ++bin) b.begin_of[bin] += b.begin_of[bin - 1];
  b.placed.resize(window_.size());
  std::vector<int64_t> next(b.begin_of.begin(), b.begin_of.end() - 1);
  for (size_t i = 0; i < window_.size(); ++i) {
    b.placed[static_cast<size_t>(next[static_cast<size_t>(b.bin_of[i])]++)] = static_cast<int32_t>(i);
  }
  for (size_t bin = 0; bin + 1 < b.begin_of.size(); ++bin, ++rows_) {
    uint64_t place = static_cast<uint64_t>(rows_ * context_);
    for (int64_t p = b.begin_of[bin]; p < b.begin_of[bin + 1]; ++p) {
      const Piece& piece = window_[static_cast<size_t>(b.placed[static_cast<size_t>(p)])];
      sink_.add({static_cast<uint64_t>(piece.token), place, static_cast<uint64_t>(piece.count)});
      place += static_cast<uint64_t>(piece.count);
    }
  }
  b.clear();
}

}  // namespace annulus
