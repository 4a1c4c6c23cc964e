// Merges parts on CPUs, and passes tensors on GPUs to merge_cuda.cc; see merge.h.
#include "attention/tiles/merge.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/tiles/merge_row.h"
#include "attention/tiles/weighted_sum.h"
#include "common/error.h"

namespace annulus {

#ifdef ANNULUS_CUDA
void merge_on_cuda(const at::Tensor& out, const MergeArguments& arguments);  // merge_cuda.cc
#endif

namespace {

// Values [b, h, n, D] and their lse [b, h, n]. lse, or both, may be missing.
template <typename T>
struct Rows {
  T* values = nullptr;
  T* lse = nullptr;
  std::array<int64_t, 4> value_strides{};
  std::array<int64_t, 3> lse_strides{};

  Rows(const at::Tensor& v, const at::Tensor& l) {
    if (!v.defined()) return;
    values = v.data_ptr<T>();
    std::copy(v.strides().begin(), v.strides().end(), value_strides.begin());
    if (!l.defined()) return;
    lse = l.data_ptr<T>();
    std::copy(l.strides().begin(), l.strides().end(), lse_strides.begin());
  }
  T* at(int64_t b, int64_t h, int64_t i) const {
    return values + b * value_strides[0] + h * value_strides[1] + i * value_strides[2];
  }
  T& lse_at(int64_t b, int64_t h, int64_t i) const {
    return lse[b * lse_strides[0] + h * lse_strides[1] + i * lse_strides[2]];
  }
};

// One pass over the rows. merge_row.h does the same on GPUs, in the same order.
template <typename T>
void merge_on_cpu(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                  const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index) {
  constexpr T kNothing = -std::numeric_limits<T>::infinity();
  const Rows<T> to(out, lse), before(before_out, before_lse);
  std::vector<Rows<T>> from;
  for (const MergePart& part : parts) from.emplace_back(part.out, part.lse);
  const int64_t* const target = index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  const int64_t batch = out.size(0), heads = out.size(1), dim = out.size(3);
  const int64_t rows = target ? index.numel() : out.size(2);
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(dim, 1));
  at::parallel_for(0, batch * heads * rows, grain, [&](int64_t begin, int64_t end) {
    std::array<const T*, kMostParts + 1> values;
    std::array<T, kMostParts + 1> weights;  // at first the lse
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = r % rows, h = r / rows % heads, b = r / rows / heads, row = target ? target[i] : i;
      size_t n = 0;
      const auto add = [&](const Rows<T>& source, int64_t own_b, int64_t own_h, int64_t own) {
        const T weight = to.lse ? source.lse_at(own_b, own_h, own) : T(0);
        if (weight == kNothing) return;
        values[n] = source.at(own_b, own_h, own);
        weights[n++] = weight;
      };
      for (size_t p = 0; p < parts.size(); ++p) {
        const MergePart& part = parts[p];
        if (target) {
          add(from[p], b, h, i);
        } else if (part.rows.contains(i) && part.heads.contains(h) && part.batch.contains(b)) {
          add(from[p], part.batch.index_of(b), part.heads.index_of(h), part.rows.index_of(i));
        }
      }
      if (n == 0 && before.values == to.values) continue;  // merging in place: the row stays as it is
      if (before.values) add(before, b, h, row);
      T* const o = to.at(b, h, row);
      if (n == 0) {
        std::fill_n(o, dim, T(0));
        if (to.lse) to.lse_at(b, h, row) = kNothing;
        continue;
      }
      if (n == 1) {
        std::copy_n(values[0], dim, o);
        if (to.lse) to.lse_at(b, h, row) = weights[0];
        continue;
      }
      if (to.lse) {
        const T most = *std::max_element(weights.begin(), weights.begin() + n);
        T sum = 0;
        for (size_t s = 0; s < n; ++s) sum += weights[s] = std::exp(weights[s] - most);
        for (size_t s = 0; s < n; ++s) weights[s] /= sum;
        to.lse_at(b, h, row) = most + std::log(sum);
      } else {
        std::fill_n(weights.begin(), n, T(1));
      }
      weighted_sum(values.data(), weights.data(), static_cast<int64_t>(n), dim, o);
    }
  });
}

MergeType merge_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return MergeType::kDouble;
    case at::kBFloat16:
      return MergeType::kBFloat16;
    case at::kHalf:
      return MergeType::kHalf;
    default:
      return MergeType::kFloat;
  }
}

MergeRows merge_rows(const at::Tensor& values, const at::Tensor& lse) {
  MergeRows r;
  if (!values.defined()) return r;
  r.values = values.data_ptr();
  for (int64_t d = 0; d < 3; ++d) r.value_strides[d] = values.stride(d);
  if (!lse.defined()) return r;
  r.lse = lse.data_ptr();
  for (int64_t d = 0; d < 3; ++d) r.lse_strides[d] = lse.stride(d);
  return r;
}

bool in_fours(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  bool fits = address % (4 * tensor.element_size()) == 0;
  for (int64_t d = 0; d < 3; ++d) fits = fits && (tensor.size(d) < 2 || tensor.stride(d) % 4 == 0);
  return fits;
}

}  // namespace

MergeArguments merge_arguments(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                               const at::Tensor& before_lse, std::span<const MergePart> parts,
                               const at::Tensor& index) {
  static_assert(MergeArguments::kMost == kMostParts);
  MergeArguments a;
  a.to = merge_rows(out, lse);
  a.before = merge_rows(before_out, before_lse);
  a.batch = out.size(0), a.heads = out.size(1), a.dim = out.size(3);
  a.rows = index.defined() ? index.numel() : out.size(2);
  a.index = index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  a.part_type = merge_type(parts.empty() ? out : parts[0].out);
  const MergeType accumulator = a.part_type == MergeType::kDouble ? MergeType::kDouble : MergeType::kFloat;
  a.narrow = merge_type(out) != accumulator;
  if (a.narrow && merge_type(out) != a.part_type) {
    throw Error(ErrorKind::kInternal, "kernel",
                std::string("parts of ") + c10::toString(parts[0].out.scalar_type()) + " cannot be merged into " +
                    c10::toString(out.scalar_type()));
  }
  a.aligned = a.dim % 4 == 0 && in_fours(out) && in_fours(before_out);
  for (const MergePart& part : parts) {
    const auto members = [](const Span& s) { return MergeSpan{s.begin, s.stride, (s.count - 1) * s.stride}; };
    a.parts[a.count++] = {merge_rows(part.out, part.lse),
                          {members(part.batch), members(part.heads), members(part.rows)}};
    a.aligned = a.aligned && in_fours(part.out);
  }
  return a;
}

void merge_parts(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                 const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index) {
  if (parts.size() > kMostParts || (index.defined() && parts.size() != 1)) {
    throw Error(ErrorKind::kInternal, "kernel", "cannot merge " + std::to_string(parts.size()) + " parts at once");
  }
  at::ScalarType type = lse.defined()          ? lse.scalar_type()
                        : before_out.defined() ? before_out.scalar_type()
                                               : out.scalar_type();
  if (type != at::kDouble) type = at::kFloat;
  std::vector<MergePart> list(parts.begin(), parts.end());
#ifdef ANNULUS_CUDA
  if (out.is_cuda()) {
    for (MergePart& part : list) {
      if (type == at::kDouble) part.out = part.out.to(type);
    }
    return merge_on_cuda(out, merge_arguments(out, lse, before_out, before_lse, list, index));
  }
#endif
  for (MergePart& part : list) part.out = part.out.to(type);
  const bool narrow = out.scalar_type() != type;
  const at::Tensor target = narrow ? at::empty(out.sizes(), out.options().dtype(type)) : out;
  if (type == at::kDouble) {
    merge_on_cpu<double>(target, lse, before_out, before_lse, list, index);
  } else {
    merge_on_cpu<float>(target, lse, before_out, before_lse, list, index);
  }
  if (narrow) out.copy_(target);
}

void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index) {
  const MergePart part(part_out, part_lse, 0);
  merge_parts(out, lse, out, lse, {&part, 1}, index);
}

}  // namespace annulus
