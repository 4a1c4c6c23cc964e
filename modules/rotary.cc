// See rotary.h.
#include "modules/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <cstdio>
#include <memory>
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

}  // namespace

RotaryTable make_rotary_table(const at::Tensor& positions, int64_t head_dim, double theta, at::ScalarType dtype,
                              at::Device device) {
  const at::Tensor frequency =
      (at::arange(0, head_dim, 2, at::TensorOptions(at::kDouble)) * (-std::log(theta) / static_cast<double>(head_dim)))
          .exp();
  const at::Tensor angle = at::outer(positions.to(at::kCPU, at::kDouble), frequency);
  return {upload(angle.cos().to(dtype), device), upload(angle.sin().to(dtype), device)};
}

RotaryTable rotary_table_at(const std::vector<Span>& spans, int64_t offset, int64_t head_dim, double theta,
                            at::ScalarType dtype, at::Device device) {
  char base[32];
  std::snprintf(base, sizeof base, "%a", theta);
  std::string key = device.str() + " " + c10::toString(dtype) + " " + std::to_string(head_dim) + " " + base;
  for (const Span& s : spans) {
    if (!s.empty()) {
      key += " " + std::to_string(s.begin + offset) + ":" + std::to_string(s.stride) + ":" + std::to_string(s.count);
    }
  }
  const KeptPointer kept = *kept_tables().get(
      key,
      [&]() -> KeptPointer {
        const c10::InferenceMode off(false);  // tensors of inference would be of no use to training
        auto made = std::make_shared<KeptTable>();
        made->table = make_rotary_table(positions_in(spans, offset), head_dim, theta, dtype, device);
        made->uploads.mark(device);
        return made;
      },
      [](const KeptPointer& k) { return static_cast<int64_t>(k->table.cosine.nbytes() + k->table.sine.nbytes()); });
  // What was uploaded while a graph is captured is filled when that is replayed: the graph's alone.
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
