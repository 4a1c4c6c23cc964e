// Makes a Composition from tiles; see composition.h.
#include "attention/kernels/composition.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <type_traits>

#include "attention/tiles/tile_groups.h"

namespace annulus {
namespace {

// The most keys of one gathered problem. Longer lists of keys are cut, and the parts' results are merged.
constexpr int64_t kMostKeys = 16384;
// The most triangles, or rectangles without a band, that are compared with each other.
constexpr int64_t kFew = 64;
// The most problems in one call. Operators limit their batch to 65535.
constexpr int64_t kMostProblems = 32768;

// One problem, which may become a call on views or be gathered with others: one rectangle, or several rectangles
// without a band that share their queries.
struct Problem {
  Span batch;  // global rows
  HeadGroup heads;
  std::vector<Rectangle> rectangles;  // all have the same queries

  int64_t queries() const { return rectangles[0].query_rows.count; }
  int64_t keys() const {
    int64_t keys = 0;
    for (const Rectangle& r : rectangles) keys += r.key_rows.count;
    return keys;
  }
};

// Numbers the rows of `width` heads that storage [batch, rows, heads] consists of.
struct RowNumbers {
  int64_t rows, heads, width;
  int64_t at(int64_t batch, int64_t row, int64_t head) const {
    return (batch * rows + row) * (heads / width) + head / width;
  }
};

// Whether rows of heads.count heads can hold exactly these heads, among `all` heads of the storage.
bool aligned(const Span& heads, int64_t all) {
  return (heads.count == 1 || heads.stride == 1) && heads.begin % heads.count == 0 && all % heads.count == 0;
}

class Composer {
 public:
  Composer(const CompositionInput& input) : in_(input) {}

  Composition run(std::span<const Tile> tiles) {
    std::vector<Tile> whole;
    for (const Tile& tile : tiles) {
      if (tile.batch.empty() || tile.heads.empty()) continue;
      if (tile.mask >= 0) {  // no operator takes bits
        out_.dense.push_back(tile);
        continue;
      }
      const bool banded = !tile.band.unbounded_below() || !tile.band.unbounded_above();
      if (!banded && blocks_of(tile.batch, tile.heads, tile.query_rows) < in_.fill) {
        whole.push_back(tile);
        continue;
      }
      const auto rectangles = rectangles_of(tile);
      if (!rectangles) {
        out_.dense.push_back(tile);
        continue;
      }
      for (const Rectangle& r : *rectangles) {
        if (in_.any_band || r.whole() || r.lower_triangle()) {
          pieces_.push_back({tile.batch, tile.heads, r});
        } else {
          for (const Rectangle& piece : triangles_of(r)) pieces_.push_back({tile.batch, tile.heads, piece});
        }
      }
    }
    do {
      join_triangles();
    } while (join_rectangles());
    for (const Piece& piece : pieces_) add(piece.batch, piece.heads, {piece.rectangle});
    for (const TileGroup& group : group_tiles(whole, kMostKeys)) {
      std::vector<Rectangle> rectangles;
      for (const Tile& tile : group.tiles) {
        rectangles.push_back({tile.query_rows, tile.key_rows, tile.grad_rows, tile.band});
      }
      add(group.tiles[0].batch, group.tiles[0].heads, std::move(rectangles));
    }
    for (const auto& [shape, problems] : views_) {
      if (problems.size() == 1) {  // there is nothing to gather it with
        out_.direct.push_back({problems[0].batch, problems[0].heads, problems[0].rectangles[0]});
        continue;
      }
      for (const Problem& problem : problems) add_gathered(problem);
    }
    gather();
    return std::move(out_);
  }

 private:
  using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;  // heads, kv heads, n, m, band

  struct Piece {
    Span batch, heads;
    Rectangle rectangle;
  };

  // Joins two triangles along the diagonal and the rectangle between them to one triangle. So the causal part of a
  // rank's own two zigzag chunks becomes one call (docs/internals/kernels.md has a drawing).
  void join_triangles() {
    const auto is_triangle = [](const Piece& p) { return p.rectangle.lower_triangle() && !p.rectangle.reversed; };
    if (std::count_if(pieces_.begin(), pieces_.end(), is_triangle) > kFew) return;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      while (is_triangle(pieces_[i])) {
        size_t next = pieces_.size(), between = pieces_.size();
        for (size_t j = 0; j < pieces_.size() && next == pieces_.size(); ++j) {
          if (j != i && is_triangle(pieces_[j]) && follows(pieces_[i], pieces_[j])) next = j;
        }
        for (size_t j = 0; next < pieces_.size() && j < pieces_.size() && between == pieces_.size(); ++j) {
          if (lies_between(pieces_[i], pieces_[next], pieces_[j])) between = j;
        }
        if (between == pieces_.size()) break;
        Rectangle& joined = pieces_[i].rectangle;
        const Rectangle& other = pieces_[next].rectangle;
        joined.query_rows.count += other.query_rows.count;
        joined.key_rows.count += other.key_rows.count;
        if (!joined.grad_rows.empty()) joined.grad_rows.count += other.grad_rows.count;
        pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(std::max(next, between)));
        pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(std::min(next, between)));
        i -= (next < i ? 1 : 0) + (between < i ? 1 : 0);
      }
    }
  }
  // Whether the rows of y follow those of x.
  static bool goes_on(const Span& x, const Span& y) {
    return x.empty() == y.empty() && (x.empty() || (x.stride == y.stride && y.begin == x.last() + x.stride));
  }
  static bool follows(const Piece& a, const Piece& b) {
    const Rectangle &r = a.rectangle, &s = b.rectangle;
    return a.batch == b.batch && a.heads == b.heads && goes_on(r.query_rows, s.query_rows) &&
           goes_on(r.key_rows, s.key_rows) && goes_on(r.grad_rows, s.grad_rows);
  }
  static bool lies_between(const Piece& a, const Piece& b, const Piece& piece) {
    const Rectangle& r = piece.rectangle;
    return r.whole() && piece.batch == a.batch && piece.heads == a.heads && r.query_rows == b.rectangle.query_rows &&
           r.key_rows == a.rectangle.key_rows && r.grad_rows == a.rectangle.grad_rows;
  }

  // Joins rectangles without a band that have the same keys and consecutive queries, or the same queries and
  // consecutive keys. So a zigzag rank's two chunks of queries, or those of a block's keys, become one call. Returns
  // whether there were any.
  bool join_rectangles() {
    bool any = false;
    const auto is_whole = [](const Piece& p) { return p.rectangle.whole() && !p.rectangle.reversed; };
    if (std::count_if(pieces_.begin(), pieces_.end(), is_whole) > kFew) return false;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (!is_whole(pieces_[i])) continue;
      for (size_t j = 0; j < pieces_.size();) {
        if (i == j || !is_whole(pieces_[j]) || !take_in(pieces_[i], pieces_[j])) {
          ++j;
          continue;
        }
        pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(j));
        i -= j < i ? 1 : 0;
        j = 0;  // what is larger now may have further neighbours
        any = true;
      }
    }
    return any;
  }
  // Adds b to a if together they are a rectangle.
  static bool take_in(Piece& a, const Piece& b) {
    Rectangle& r = a.rectangle;
    const Rectangle& s = b.rectangle;
    if (a.batch != b.batch || a.heads != b.heads) return false;
    if (r.key_rows == s.key_rows && r.grad_rows == s.grad_rows && goes_on(r.query_rows, s.query_rows)) {
      r.query_rows.count += s.query_rows.count;
      return true;
    }
    if (r.query_rows != s.query_rows || !goes_on(r.key_rows, s.key_rows) || !goes_on(r.grad_rows, s.grad_rows)) {
      return false;
    }
    r.key_rows.count += s.key_rows.count;
    r.grad_rows.count += s.grad_rows.count;  // 0 in a forward
    return true;
  }

  static int64_t blocks_of(const Span& batch, const Span& heads, const Span& rows) {
    return batch.count * heads.count * ceil_div(rows.count, 128);
  }

  void add(const Span& batch, const Span& all_heads, std::vector<Rectangle> rectangles) {
    for (const HeadGroup& heads : head_groups(all_heads, in_.group)) {
      const Problem problem{batch, heads, rectangles};
      const bool view = rectangles.size() == 1 && !rectangles[0].reversed;
      if (view && blocks_of(batch, heads.query, rectangles[0].query_rows) >= in_.fill) {
        out_.direct.push_back({batch, heads, rectangles[0]});
      } else if (view) {
        views_[shape_of(heads, problem)].push_back(problem);
      } else {
        add_gathered(problem);
      }
    }
  }

  static Shape shape_of(const HeadGroup& heads, const Problem& problem) {
    const Band& band = problem.rectangles[0].band;
    return {heads.query.count, heads.kv.count, problem.queries(), problem.keys(), band.lo, band.hi};
  }

  // Adds a problem that is gathered. Its rows comprise all its heads if the storage consists of such rows; otherwise
  // each head becomes a problem.
  void add_gathered(const Problem& problem) {
    const Span kv = indices_of(problem.heads.kv, in_.keys.heads, "kv heads");
    const Span grad_kv = in_.grads.rows > 0 ? indices_of(problem.heads.kv, in_.grads.heads, "kv heads") : kv;
    const bool together = aligned(problem.heads.query, in_.heads) && aligned(kv, in_.keys.heads.count) &&
                          (in_.grads.rows == 0 || aligned(grad_kv, in_.grads.heads.count));
    std::vector<HeadGroup> parts{problem.heads};
    if (!together) {
      parts.clear();
      for (int64_t h = 0; h < problem.heads.query.count; ++h) {
        const int64_t head = problem.heads.query.at(h);
        parts.push_back({Span::range(head, head + 1), Span::range(head / in_.group, head / in_.group + 1)});
      }
    }
    for (const HeadGroup& heads : parts) {
      const Shape shape = shape_of(heads, problem);
      for (int64_t b = 0; b < problem.batch.count; ++b) {
        problems_[shape].push_back({problem.batch.sub(b, 1), heads, problem.rectangles});
      }
    }
  }

  void gather() {
    std::vector<int32_t> wave_of;  // for each query row the last wave that names it, or -1
    for (const auto& [shape, problems] : problems_) {
      const auto& [heads, kv_heads, n, m, lo, hi] = shape;
      const RowNumbers numbers{in_.rows, in_.heads, heads};
      const int64_t most = std::clamp<int64_t>(in_.most_gathered / (std::max(n, m) * heads), 1, kMostProblems);
      wave_of.assign(wave_of.size(), -1);
      std::vector<GatherCall> calls;  // the open call of each wave
      for (const Problem& problem : problems) {
        const Span& rows = problem.rectangles[0].query_rows;
        const auto number = [&](int64_t i) {
          return numbers.at(problem.batch.begin, rows.at(i), problem.heads.query.begin);
        };
        int32_t wave = 0;
        for (int64_t i = 0; i < n; ++i) {
          const auto row = static_cast<size_t>(number(i));
          if (row >= wave_of.size()) wave_of.resize(row + 1, -1);
          wave = std::max(wave, wave_of[row] + 1);
        }
        for (int64_t i = 0; i < n; ++i) wave_of[static_cast<size_t>(number(i))] = wave;
        if (static_cast<size_t>(wave) == calls.size())
          calls.push_back({0, n, m, heads, kv_heads, {lo, hi}, {}, {}, {}});
        GatherCall& call = calls[static_cast<size_t>(wave)];
        append(problem, call);
        if (call.count == most) {
          out_.gathered.push_back(call);
          call = {0, n, m, heads, kv_heads, {lo, hi}, {}, {}, {}};
        }
      }
      for (GatherCall& call : calls) {
        if (call.count > 0) out_.gathered.push_back(std::move(call));
      }
    }
  }

  void append(const Problem& problem, GatherCall& call) const {
    const bool reversed = problem.rectangles[0].reversed;
    const auto each = [&](const Span& rows, const auto& take) {
      for (int64_t i = 0; i < rows.count; ++i) take(rows.at(reversed ? rows.count - 1 - i : i));
    };
    ++call.count;
    const RowNumbers q{in_.rows, in_.heads, call.heads};
    each(problem.rectangles[0].query_rows,
         [&](int64_t row) { call.query_rows.push_back(q.at(problem.batch.begin, row, problem.heads.query.begin)); });
    const auto add = [&](const BlockShape& block, bool grads, std::vector<int64_t>& to) {
      const RowNumbers numbers{block.rows, block.heads.count, call.kv_heads};
      const int64_t batch = indices_of(problem.batch, block.batch, "batch rows").begin;
      const int64_t head = indices_of(problem.heads.kv, block.heads, "kv heads").begin;
      for (const Rectangle& r : problem.rectangles) {
        each(grads ? r.grad_rows : r.key_rows, [&](int64_t row) { to.push_back(numbers.at(batch, row, head)); });
      }
    };
    add(in_.keys, false, call.key_rows);
    if (in_.grads.rows > 0) add(in_.grads, true, call.grad_rows);
  }

  const CompositionInput& in_;
  Composition out_;
  std::vector<Piece> pieces_;
  std::map<Shape, std::vector<Problem>> views_;     // problems that are too small to fill a device alone
  std::map<Shape, std::vector<Problem>> problems_;  // problems to be gathered
};

}  // namespace

int64_t Composition::bytes() const {
  size_t bytes = sizeof *this + direct.capacity() * sizeof(DirectCall) + dense.capacity() * sizeof(Tile);
  for (const GatherCall& call : gathered) {
    bytes += sizeof call + 8 * (call.query_rows.capacity() + call.key_rows.capacity() + call.grad_rows.capacity());
  }
  return static_cast<int64_t>(bytes);
}

Composition compose(std::span<const Tile> tiles, const CompositionInput& input) { return Composer(input).run(tiles); }

std::string composition_key(uint64_t program, std::span<const Tile> tiles, const CompositionInput& in) {
  static_assert(std::has_unique_object_representations_v<Span>);
  std::string key;
  const auto add = [&key](const auto&... values) {
    (key.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
  };
  add(program, static_cast<const void*>(tiles.data()), tiles.size());
  for (const BlockShape& block : {in.keys, in.grads}) add(block.batch, block.heads, block.rows);
  add(in.rows, in.heads, in.group, in.any_band, in.most_gathered, in.fill);
  return key;
}

}  // namespace annulus
