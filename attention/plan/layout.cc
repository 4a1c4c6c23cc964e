// Makes layouts; see layout.h.
#include "attention/plan/layout.h"

#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_layout(const std::string& message) { throw Error(ErrorKind::kPlan, "layout", message); }

// Appends a span and joins neighbouring ranges: rank P-1 of a zigzag owns two chunks that touch, and fewer spans give
// fewer tiles.
void append(std::vector<Span>& spans, Span span) {
  if (span.empty()) return;
  if (!spans.empty() && spans.back().stride == 1 && span.stride == 1 && spans.back().last() + 1 == span.begin) {
    spans.back().count += span.count;
  } else {
    spans.push_back(span);
  }
}

}  // namespace

const std::vector<std::string>& layout_names() {
  static const std::vector<std::string> names = {"contiguous", "zigzag", "striped", "balanced", "per-document"};
  return names;
}

std::string_view to_string(LayoutKind kind) { return layout_names()[static_cast<size_t>(kind)]; }

LayoutKind parse_layout(std::string_view name, std::string_view where) {
  return static_cast<LayoutKind>(index_of_name(name, layout_names(), "layout", where));
}

int64_t Layout::count(int rank) const {
  int64_t total = 0;
  for (const Span& s : spans[static_cast<size_t>(rank)]) total += s.count;
  return total;
}

std::vector<int64_t> Layout::positions(int rank) const {
  std::vector<int64_t> all;
  all.reserve(static_cast<size_t>(count(rank)));
  for (const Span& s : spans[static_cast<size_t>(rank)]) {
    for (int64_t i = 0; i < s.count; ++i) all.push_back(s.at(i));
  }
  return all;
}

Layout make_layout(LayoutKind kind, int64_t length, int ranks) {
  if (ranks < 1) refuse_layout("expected at least one rank, got " + std::to_string(ranks));
  Layout layout{length, std::vector<std::vector<Span>>(static_cast<size_t>(ranks))};
  const auto chunk = [length](int64_t i, int64_t c) {
    const auto border = [&](int64_t n) { return static_cast<int64_t>(static_cast<__int128>(n) * length / c); };
    return Span::range(border(i), border(i + 1));
  };
  for (int r = 0; r < ranks; ++r) {
    std::vector<Span>& spans = layout.spans[static_cast<size_t>(r)];
    switch (kind) {
      case LayoutKind::kContiguous:
        append(spans, chunk(r, ranks));
        break;
      case LayoutKind::kZigzag:
        append(spans, chunk(r, 2 * int64_t{ranks}));
        append(spans, chunk(2 * int64_t{ranks} - 1 - r, 2 * int64_t{ranks}));
        break;
      case LayoutKind::kStriped:
        append(spans, {r, ranks, length > r ? (length - r + ranks - 1) / ranks : 0});
        break;
      case LayoutKind::kBalanced:
      case LayoutKind::kPerDocument:
        throw Error(ErrorKind::kInternal, "layout",
                    "the layout " + std::string(to_string(kind)) + " was asked for without a pattern");
    }
  }
  return layout;
}

std::vector<int64_t> layout_counts(LayoutKind kind, int64_t length, int ranks) {
  const Layout made = make_layout(is_dealt(kind) ? LayoutKind::kContiguous : kind, length, ranks);
  std::vector<int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(made.count(r));
  return counts;
}

Layout make_uneven_layout(const std::vector<int64_t>& lengths, int64_t length) {
  Layout layout{length, {}};
  int64_t begin = 0;
  for (size_t r = 0; r < lengths.size(); ++r) {
    if (lengths[r] < 0 || lengths[r] > length) {
      refuse_layout("the length of rank " + std::to_string(r) + " must be between 0 and " + std::to_string(length) +
                    ", got " + std::to_string(lengths[r]));
    }
    layout.spans.emplace_back();
    append(layout.spans.back(), Span::range(begin, begin + lengths[r]));
    begin += lengths[r];
  }
  if (begin != length) {
    refuse_layout("the ranks' lengths must add up to the sequence's " + std::to_string(length) + ", but add up to " +
                  std::to_string(begin));
  }
  return layout;
}

void require_even(LayoutKind kind, int64_t length, int ranks, std::string_view what) {
  const auto unit = [kind](int64_t n) { return kind == LayoutKind::kZigzag ? 2 * n : n; };
  const int64_t m = unit(ranks);
  if (length % m == 0) return;
  std::string fitting;
  for (int64_t n = 1, found = 0; n <= 4 * int64_t{ranks} && found < 6; ++n) {
    if (length % unit(n) == 0) fitting += (found++ ? ", " : "") + std::to_string(n);
  }
  refuse_layout(std::string(what) + " of length " + std::to_string(length) + " cannot be divided evenly among " +
                counted(ranks, "rank") + " by layout \"" + std::string(to_string(kind)) +
                "\": the length must be a multiple of " + std::to_string(m) + "; use a length of " +
                (length / m > 0 ? std::to_string(length / m * m) + " or " : "") + std::to_string((length / m + 1) * m) +
                (fitting.empty() ? "" : ", or one of these rank counts: " + fitting) +
                ", or uneven shares: attention.even = false in a configuration, no --even on the command line");
}

}  // namespace annulus
