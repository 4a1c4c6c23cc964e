// See flash.h.
#include "attention/cpu_flash/flash.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu_flash/gemm.h"
#include "attention/cpu_flash/row_math.h"
#include "attention/tiles/tile_groups.h"

namespace annulus {
namespace {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// Keys [first, past) of a piece.
template <typename T>
struct Part {
  const KeyPiece<T>* piece;
  int64_t first, past;
  int64_t column;  // of its first key, among the chunk's keys
  bool cut;        // its band hides some of these pairs

  int64_t count() const { return past - first; }
};

template <typename T>
T* room(std::vector<T>& buffer, int64_t elements) {
  if (static_cast<int64_t>(buffer.size()) < elements) buffer.resize(static_cast<size_t>(elements));
  return buffer.data();
}

// The keys that some row of the block sees, in chunks of at most kMostKeys: visit(parts, keys).
template <typename T, typename Visit>
void for_each_chunk(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, Visit visit) {
  std::vector<Part<T>> parts;
  int64_t columns = 0;
  const auto flush = [&] {
    if (columns > 0) visit(std::span<const Part<T>>(parts), columns);
    parts.clear(), columns = 0;
  };
  for (const KeyPiece<T>& piece : pieces) {
    const Span seen = keys_seen(block.positions, piece.positions, piece.band);
    const Span by_first = keys_seen(block.positions.sub(0, 1), piece.positions, piece.band);
    const Span by_last = keys_seen(block.positions.sub(block.count - 1, 1), piece.positions, piece.band);
    int64_t first = seen.begin;
    const int64_t past = seen.begin + seen.count, by_all = by_first.begin + by_first.count;
    while (first < past) {
      const int64_t n = std::min(past - first, kMostKeys - columns);
      parts.push_back({&piece, first, first + n, columns, by_last.begin > first || by_all < first + n});
      first += n, columns += n;
      if (columns == kMostKeys) flush();
    }
  }
  flush();
}

// Keys of a chunk that one matrix product takes.
template <typename T>
struct Operand {
  int64_t column, count;
  Rows<const T> k, v;
  Rows<T> dk, dv;
};

// Copies a chunk's rows side by side.
template <typename T>
Rows<const T> gather(std::span<const Part<T>> parts, Rows<const T> KeyPiece<T>::*which, int64_t columns, int64_t dim,
                     std::vector<T>& buffer) {
  T* const to = room(buffer, columns * dim);
  for (const Part<T>& part : parts) {
    for (int64_t j = 0; j < part.count(); ++j) {
      std::copy_n((part.piece->*which).at(part.first + j), dim, to + (part.column + j) * dim);
    }
  }
  return {to, dim};
}

// Adds a chunk's gathered rows to where they belong.
template <typename T>
void scatter(std::span<const Part<T>> parts, Rows<T> KeyPiece<T>::*which, int64_t dim, const Rows<T>& rows) {
  for (const Part<T>& part : parts) {
    for (int64_t j = 0; j < part.count(); ++j) {
      T* const to = (part.piece->*which).at(part.first + j);
      const T* const from = rows.at(part.column + j);
      for (int64_t d = 0; d < dim; ++d) to[d] += from[d];
    }
  }
}

// Parts of many keys are multiplied where they lie: copying costs more than products of 64 keys and more lose. Short
// ones are gathered.
template <typename T>
class Operands {
 public:
  Operands(std::span<const Part<T>> parts, int64_t columns, int64_t dim, bool backward, FlashScratch<T>& scratch)
      : parts_(parts), dim_(dim), gathered_(columns < kFewestKeys * static_cast<int64_t>(parts.size())) {
    if (gathered_ && parts.size() > 1) {
      Operand<T> all{0,
                     columns,
                     gather(parts, &KeyPiece<T>::k, columns, dim, scratch.keys),
                     gather(parts, &KeyPiece<T>::v, columns, dim, scratch.values),
                     {},
                     {}};
      if (backward) {
        all.dk = {room(scratch.dk, columns * dim), dim};
        all.dv = {room(scratch.dv, columns * dim), dim};
        std::fill_n(all.dk.data, columns * dim, T{0});
        std::fill_n(all.dv.data, columns * dim, T{0});
      }
      list_.push_back(all);
      return;
    }
    gathered_ = false;
    const auto from = [](const auto& rows, int64_t row) {
      auto moved = rows;
      moved.data = rows.at(row);
      return moved;
    };
    for (const Part<T>& part : parts) {
      const KeyPiece<T>& piece = *part.piece;
      list_.push_back({part.column, part.count(), from(piece.k, part.first), from(piece.v, part.first), {}, {}});
      if (backward) list_.back().dk = from(piece.dk, part.first), list_.back().dv = from(piece.dv, part.first);
    }
  }

  const std::vector<Operand<T>>& list() const { return list_; }
  void scatter_gradients() const {
    if (!gathered_) return;
    scatter(parts_, &KeyPiece<T>::dk, dim_, list_[0].dk);
    scatter(parts_, &KeyPiece<T>::dv, dim_, list_[0].dv);
  }

 private:
  static constexpr int64_t kFewestKeys = 64;  // of a part, on average
  std::span<const Part<T>> parts_;
  int64_t dim_;
  bool gathered_;
  std::vector<Operand<T>> list_;
};

// -inf where a band hides the pair.
template <typename T>
void hide(const QueryBlock<T>& block, std::span<const Part<T>> parts, int64_t columns, T* scores) {
  for (const Part<T>& part : parts) {
    if (!part.cut) continue;
    for (int64_t i = 0; i < block.count; ++i) {
      const Span seen = keys_seen(block.positions.sub(i, 1), part.piece->positions, part.piece->band);
      const int64_t first = std::clamp(seen.begin, part.first, part.past) - part.first;
      const int64_t past = std::clamp(seen.begin + seen.count, part.first, part.past) - part.first;
      T* const row = scores + i * columns + part.column;
      std::fill(row, row + first, -kInfinity<T>);
      std::fill(row + past, row + part.count(), -kInfinity<T>);
    }
  }
}

}  // namespace

template <typename T>
void flash_forward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                   FlashScratch<T>& scratch) {
  const int64_t rows = block.count;
  T* const out = room(scratch.out, rows * dim);
  T* const maximum = room(scratch.maximum, rows);
  T* const sum = room(scratch.sum, rows);
  for (int64_t i = 0; i < rows; ++i) {
    maximum[i] = block.lse[i * block.lse_step];
    sum[i] = maximum[i] == -kInfinity<T> ? 0 : 1;
    std::copy_n(block.out.at(i), dim, out + i * dim);
  }
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, int64_t columns) {
    T* const scores = room(scratch.scores, rows * columns);
    const Operands<T> operands(parts, columns, dim, false, scratch);
    for (const Operand<T>& o : operands.list()) {
      gemm<T>('N', 'T', rows, o.count, dim, scale, block.q.data, block.q.step, o.k.data, o.k.step, 0, scores + o.column,
              columns);
    }
    hide(block, parts, columns, scores);
    for (int64_t i = 0; i < rows; ++i) {
      T* const row = scores + i * columns;
      const T most = row_max(row, columns, maximum[i]);
      const T shift = most == -kInfinity<T> ? 0 : most;
      const T kept = std::exp(maximum[i] - shift);
      sum[i] = sum[i] * kept + row_exp(row, columns, shift);
      if (kept != 1) {
        for (int64_t d = 0; d < dim; ++d) out[i * dim + d] *= kept;
      }
      maximum[i] = most;
    }
    for (const Operand<T>& o : operands.list()) {
      gemm<T>('N', 'N', rows, dim, o.count, 1, scores + o.column, columns, o.v.data, o.v.step, 1, out, dim);
    }
  });
  for (int64_t i = 0; i < rows; ++i) {
    if (sum[i] == 0) continue;  // no key so far
    block.lse[i * block.lse_step] = maximum[i] + std::log(sum[i]);
    const T share = 1 / sum[i];
    for (int64_t d = 0; d < dim; ++d) block.out.at(i)[d] = out[i * dim + d] * share;
  }
}

template <typename T>
void flash_backward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                    FlashScratch<T>& scratch) {
  const int64_t rows = block.count;
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, int64_t columns) {
    T* const p = room(scratch.scores, rows * columns);
    T* const ds = room(scratch.gradients, rows * columns);
    const Operands<T> operands(parts, columns, dim, true, scratch);
    for (const Operand<T>& o : operands.list()) {
      gemm<T>('N', 'T', rows, o.count, dim, scale, block.q.data, block.q.step, o.k.data, o.k.step, 0, p + o.column,
              columns);
      gemm<T>('N', 'T', rows, o.count, dim, 1, block.dout.data, block.dout.step, o.v.data, o.v.step, 0, ds + o.column,
              columns);
    }
    hide(block, parts, columns, p);
    for (int64_t i = 0; i < rows; ++i) {
      row_gradient(p + i * columns, ds + i * columns, columns, block.lse[i * block.lse_step],
                   block.delta[i * block.delta_step]);
    }
    for (const Operand<T>& o : operands.list()) {
      gemm<T>('N', 'N', rows, dim, o.count, scale, ds + o.column, columns, o.k.data, o.k.step, 1, block.dq.data,
              block.dq.step);
      gemm<T>('T', 'N', o.count, dim, rows, scale, ds + o.column, columns, block.q.data, block.q.step, 1, o.dk.data,
              o.dk.step);
      gemm<T>('T', 'N', o.count, dim, rows, 1, p + o.column, columns, block.dout.data, block.dout.step, 1, o.dv.data,
              o.dv.step);
    }
    operands.scatter_gradients();
  });
}

template void flash_forward(const QueryBlock<float>&, std::span<const KeyPiece<float>>, int64_t, float,
                            FlashScratch<float>&);
template void flash_forward(const QueryBlock<double>&, std::span<const KeyPiece<double>>, int64_t, double,
                            FlashScratch<double>&);
template void flash_backward(const QueryBlock<float>&, std::span<const KeyPiece<float>>, int64_t, float,
                             FlashScratch<float>&);
template void flash_backward(const QueryBlock<double>&, std::span<const KeyPiece<double>>, int64_t, double,
                             FlashScratch<double>&);

}  // namespace annulus
