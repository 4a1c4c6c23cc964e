// See rotary.h.
#include "attention/modules/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <string>

#include "memory/caches.h"
#include "memory/upload.h"

namespace annulus {
namespace {

struct KeptTable {
  RotaryTable table;
  KeptUploads uploads;
};
using KeptPointer = std::shared_ptr<const KeptTable>;

NamedCache<KeptPointer>& kept_tables() {
  static auto& cache = *new NamedCache<KeptPointer>("rotary tables");
  return cache;
}

at::Tensor positions_in(const std::vector<Span>& spans, int64_t offset) {
  int64_t count = 0;
  for (const Span& s : spans) count += s.count;
  const at::Tensor positions = at::empty({count}, at::kLong);
  int64_t row = 0;
  for (const Span& s : spans) {
    if (s.empty()) continue;
    at::Tensor part = positions.narrow(0, row, s.count);
    at::arange_out(part, s.begin + offset, s.last() + offset + 1, s.stride);
    row += s.count;
  }
  return positions;
}

// Below, fp32 frequencies are computed as in `transformers` (modeling_rope_utils.py), operation by operation, so that
// they are the same to the bit: an error of one unit in the last place is 0.06 radians at position 1,048,576.

// theta^(2i / head_dim), whose reciprocals are the frequencies.
at::Tensor wavelengths_over_two_pi(const RotarySpec& spec) {
  const at::Tensor pairs = at::arange(0, spec.head_dim, 2, at::TensorOptions(at::kFloat));
  return at::pow(at::Scalar(spec.theta), pairs / static_cast<double>(spec.head_dim));
}

at::Tensor plain_frequencies(const RotarySpec& spec) {
  if (spec.fp32) return at::reciprocal(wavelengths_over_two_pi(spec));
  return (at::arange(0, spec.head_dim, 2, at::TensorOptions(at::kDouble)) *
          (-std::log(spec.theta) / static_cast<double>(spec.head_dim)))
      .exp();
}

at::Tensor llama3_frequencies(const at::Tensor& plain, const RotaryScaling& s) {
  const at::Tensor wavelengths = 2 * std::numbers::pi * at::reciprocal(plain);
  const double longest = s.original_context / s.low_freq_factor, shortest = s.original_context / s.high_freq_factor;
  const at::Tensor divided = at::where(wavelengths > longest, plain / s.factor, plain);
  const at::Tensor smooth =
      (at::reciprocal(wavelengths) * s.original_context - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  const at::Tensor blended = (1 - smooth) * divided / s.factor + smooth * divided;
  return at::where((wavelengths < shortest).logical_or(wavelengths > longest), divided, blended);
}

at::Tensor yarn_frequencies(const at::Tensor& plain, const RotarySpec& spec) {
  const RotaryScaling& s = spec.scaling;
  const auto head_dim = static_cast<double>(spec.head_dim);
  // The pair that rotates this many times over the original context.
  const auto pair_of = [&](double rotations) {
    return head_dim * std::log(s.original_context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(spec.theta));
  };
  double low = pair_of(s.beta_fast), high = pair_of(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, head_dim - 1);
  if (low == high) high += 0.001;
  const at::Tensor ramp =
      at::clamp((at::arange(spec.head_dim / 2, at::TensorOptions(plain.scalar_type())) - low) / (high - low), 0, 1);
  const at::Tensor keeps = 1 - ramp;
  const at::Tensor divided = spec.fp32 ? at::reciprocal(s.factor * wavelengths_over_two_pi(spec)) : plain / s.factor;
  return divided * (1 - keeps) + plain * keeps;
}

}  // namespace

at::Tensor rotary_frequencies(const RotarySpec& spec) {
  const at::Tensor plain = plain_frequencies(spec);
  switch (spec.scaling.kind) {
    case RotaryScaling::Kind::kLinear:
      return plain / spec.scaling.factor;
    case RotaryScaling::Kind::kLlama3:
      return llama3_frequencies(plain, spec.scaling);
    case RotaryScaling::Kind::kYarn:
      return yarn_frequencies(plain, spec);
    case RotaryScaling::Kind::kNone:
      return at::zeros_like(plain);
    case RotaryScaling::Kind::kDefault:
      break;
  }
  return plain;
}

RotaryTable make_rotary_table(const at::Tensor& positions, const RotarySpec& spec, at::ScalarType dtype,
                              at::Device device) {
  const at::Tensor frequency = rotary_frequencies(spec);
  const at::Tensor angle = at::outer(positions.to(at::kCPU, frequency.scalar_type()), frequency);
  const double factor = spec.attention_factor();
  return {upload(angle.cos().mul_(factor).to(dtype), device), upload(angle.sin().mul_(factor).to(dtype), device)};
}

RotaryTable rotary_table_at(const std::vector<Span>& spans, int64_t offset, const RotarySpec& spec,
                            at::ScalarType dtype, at::Device device) {
  std::string key = device.str() + " " + c10::toString(dtype) + " " + spec.text();
  for (const Span& s : spans) {
    if (!s.empty()) {
      key += " " + std::to_string(s.begin + offset) + ":" + std::to_string(s.stride) + ":" + std::to_string(s.count);
    }
  }
  const KeptPointer kept = *kept_tables().get(
      key,
      [&]() -> KeptPointer {
        const c10::InferenceMode off(false);  // training could not use inference tensors
        auto made = std::make_shared<KeptTable>();
        made->table = make_rotary_table(positions_in(spans, offset), spec, dtype, device);
        made->uploads.mark(device);
        return made;
      },
      [](const KeptPointer& k) { return static_cast<int64_t>(k->table.cosine.nbytes() + k->table.sine.nbytes()); });
  // What is uploaded while a graph is captured is filled only when the graph is replayed, so it is the graph's alone.
  if (kept->uploads.captured()) kept_tables().erase(key);
  kept->uploads.read({kept->table.cosine, kept->table.sine});
  return kept->table;
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table) {
  const at::Tensor cosine = table.cosine.unsqueeze(1);
  const at::Tensor sine = table.sine.unsqueeze(1);
  const int64_t half = x.size(-1) / 2;
  const at::Tensor a = x.narrow(-1, 0, half);
  const at::Tensor b = x.narrow(-1, half, half);
  return at::cat({a * cosine - b * sine, b * cosine + a * sine}, -1);
}

}  // namespace annulus
