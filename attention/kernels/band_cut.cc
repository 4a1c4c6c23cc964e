// See band_cut.h.
#include "attention/kernels/band_cut.h"

#include <algorithm>

namespace annulus {
namespace {

using Mask = Rectangle::Mask;

// Rows [q0, q0 + nq) and keys [k0, k0 + nk) of the tile, cut by lo <= j - i <= hi in indices counted from q0 and k0.
void cut_unit_band(int64_t q0, int64_t nq, int64_t k0, int64_t nk, int64_t lo, int64_t hi,
                   std::vector<Rectangle>& out) {
  const auto emit = [&out](Mask mask, int64_t q, int64_t rows, int64_t k, int64_t keys) {
    if (rows > 0 && keys > 0) out.push_back({mask, Span::range(q, q + rows), Span::range(k, k + keys)});
  };
  // Drop queries and keys without a partner.
  const int64_t first_q = std::max<int64_t>(0, -hi), past_q = std::min(nq, nk - lo);
  if (first_q >= past_q || lo > hi) return;
  q0 += first_q, nq = past_q - first_q, lo += first_q, hi += first_q;
  const int64_t first_k = std::max<int64_t>(0, lo), past_k = std::min(nk, nq + hi);
  if (first_k >= past_k) return;
  k0 += first_k, nk = past_k - first_k, lo -= first_k, hi -= first_k;

  const bool below = lo > -(nq - 1), above = hi < nk - 1;  // does this side cut anything?
  if (!below && !above) return emit(Mask::kFull, q0, nq, k0, nk);
  if (!below) {  // j <= i + hi, hi >= 0: the first hi keys are everyone's
    emit(Mask::kFull, q0, nq, k0, hi);
    return emit(Mask::kLower, q0, nq, k0 + hi, nk - hi);
  }
  if (!above) {  // j >= i + lo, lo <= 0: the first -lo queries see all keys
    emit(Mask::kFull, q0, -lo, k0, nk);
    const int64_t rows = nq + lo;
    emit(Mask::kUpper, q0 - lo, rows, k0, rows);
    return emit(Mask::kFull, q0 - lo, rows, k0 + rows, nk - rows);
  }
  if (nq <= Rectangle::kMaskedSide && nk <= Rectangle::kMaskedSide) return emit(Mask::kBanded, q0, nq, k0, nk);
  // A band cut on both sides: rows in chunks no longer than the band is wide, so that for each chunk one set of keys is
  // cut from below only and the rest from above only. A narrow band takes masks instead.
  const int64_t width = hi - lo + 1;
  constexpr int64_t kNarrow = Rectangle::kMaskedSide / 2;
  if (width <= kNarrow) {
    for (int64_t i = 0; i < nq; i += kNarrow) {
      const int64_t rows = std::min(kNarrow, nq - i);
      const int64_t k = std::max<int64_t>(0, i + lo), past = std::min(nk, i + rows + hi);
      emit(Mask::kBanded, q0 + i, rows, k0 + k, past - k);
    }
    return;
  }
  for (int64_t i = 0; i < nq; i += width - 1) {
    const int64_t rows = std::min(width - 1, nq - i);
    const int64_t border = std::clamp<int64_t>(i + lo + rows, 0, nk);
    cut_unit_band(q0 + i, rows, k0, border, i + lo, nk, out);
    cut_unit_band(q0 + i, rows, k0 + border, nk - border, -nq - nk, i + hi - border, out);
  }
}

}  // namespace

std::vector<Rectangle> cut_band(const Tile& tile, int64_t max_rows) {
  std::vector<Rectangle> rectangles;
  const int64_t nq = tile.query_rows.count, nk = tile.key_rows.count;
  if (nq == 0 || nk == 0) return rectangles;
  // A single row has no stride of its own.
  const int64_t q_stride = nq > 1 ? tile.query_positions.stride : (nk > 1 ? tile.key_positions.stride : 1);
  const int64_t k_stride = nk > 1 ? tile.key_positions.stride : q_stride;
  const bool cuts = !(tile.band.unbounded_below() && tile.band.unbounded_above());
  if (cuts && q_stride != k_stride) {  // the border has a slope: masks
    constexpr int64_t side = Rectangle::kMaskedSide;
    const int64_t rows = std::min(side, max_rows);
    for (int64_t i = 0; i < nq; i += rows) {
      for (int64_t j = 0; j < nk; j += side) {
        rectangles.push_back(
            {Mask::kBanded, Span::range(i, std::min(nq, i + rows)), Span::range(j, std::min(nk, j + side))});
      }
    }
    return rectangles;
  }
  // Positions q + s i and k + s j: lo <= k - q + s (j - i) <= hi is a band in j - i.
  const int64_t shift = tile.key_positions.begin - tile.query_positions.begin;
  const int64_t lo = tile.band.unbounded_below() ? -nq - nk : ceil_div(tile.band.lo - shift, q_stride);
  const int64_t hi = tile.band.unbounded_above() ? nq + nk : floor_div(tile.band.hi - shift, q_stride);
  for (int64_t i = 0; i < nq; i += max_rows) {
    const int64_t rows = std::min(max_rows, nq - i);
    cut_unit_band(i, rows, 0, nk, std::max(lo + i, -nq - nk), std::min(hi + i, nq + nk), rectangles);
  }
  return rectangles;
}

}  // namespace annulus
