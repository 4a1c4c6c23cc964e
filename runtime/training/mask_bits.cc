// See mask_bits.h.
#include "runtime/training/mask_bits.h"

#include <algorithm>
#include <set>

#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

bool any_mask(const LayerRequests& layers) {
  return std::ranges::any_of(layers.distinct, [](const PlanRequest& r) { return has_mask(r.pattern); });
}

// Calls visit(spec) for a pattern and all its members that have a mask.
template <typename Spec, typename Visit>
void for_each_mask(Spec& pattern, const Visit& visit) {
  if (!pattern.mask.empty()) visit(pattern.mask);
  for (auto& member : pattern.members) for_each_mask(member, visit);
}

// The bits that a rank holds of a request for the global batch, in which it has these rows; `own` is the same request
// for them alone. If batches have layouts of their own, its queries are none in particular.
HeldBits bits_of_rows(const PlanRequest& request, const PlanRequest& own, const Span& rows, int rank,
                      bool layouts_change) {
  const bool one = own.ranks == 1;
  HeldBits held = layouts_change && !one ? HeldBits::of({Span::range(0, own.shape.q_len)}) : needed_bits(own, rank);
  if (rows.count == request.shape.batch) return held;
  if (held.all) held = HeldBits::of({Span::range(0, own.shape.q_len)});
  for (HeldBits::Part& part : held.parts) part.batch = rows;
  return held;
}

void hold(PlanRequest& request, const HeldBits& bits) {
  for_each_mask(request.pattern, [](MaskSpec& mask) {
    if (!mask.file.empty()) mask.given = {};
  });
  request.pattern = read_block_maps(request.pattern, request.shape, bits);
}

void hold_bits(LayerRequests& layers, const Span& rows, int rank, bool layouts_change) {
  if (!any_mask(layers)) return;
  const std::vector<PlanRequest> own = layers.of_rows(rows.begin, rows.count);
  for (size_t i = 0; i < own.size(); ++i) {
    PlanRequest& request = layers.distinct[i];
    if (has_mask(request.pattern)) hold(request, bits_of_rows(request, own[i], rows, rank, layouts_change));
  }
}

}  // namespace

void require_mask_limits(const Config& config, const LayerRequests& layers, int64_t batch, int ranks) {
  if (!any_mask(layers)) return;
  const Span rows = Span::range(0, ceil_div(batch, config.mesh.data));
  const std::vector<PlanRequest> own = layers.of_rows(0, rows.count);
  for (size_t i = 0; i < own.size(); ++i) {
    const PlanRequest& of = layers.distinct[i];
    for (int rank = 0; rank < ranks && has_mask(of.pattern); ++rank) {
      const HeldBits held = bits_of_rows(of, own[i], rows, rank, layout_follows_documents(config));
      for_each_mask(of.pattern, [&](const MaskSpec& mask) {
        if (mask.file.empty()) return;  // a program has made it, with the bits that it holds
        require_mask_limit(*mask.given, held, "the mask in " + mask.file);
      });
    }
  }
}

void hold_bits(std::vector<PlanRequest>& requests, int rank) {
  for (PlanRequest& request : requests) {
    if (!has_mask(request.pattern)) continue;
    request = resolve_schedule(request);
    hold(request, needed_bits(request, rank));
  }
}

void hold_bits(const Config& config, LayerRequests& layers, const Span& rows, int rank) {
  hold_bits(layers, rows, rank, layout_follows_documents(config));
}

std::vector<PlanRequest> plannable_rows(LayerRequests layers, int64_t rows, int rank) {
  hold_bits(layers, Span::range(0, rows), rank, /*layouts_change=*/false);
  return layers.of_rows(0, rows);
}

// The masks of the global batch, with the bits of the rank's rows, which those of its rows share where these are
// others.
int64_t mask_bytes(const Config& config, const LayerRequests& layers, int64_t rows, int rank) {
  if (!any_mask(layers)) return 0;
  std::set<const TokenMask*> seen;
  int64_t bytes = 0;
  const std::vector<PlanRequest> own = layers.of_rows(0, rows);
  for (size_t i = 0; i < own.size(); ++i) {
    if (!has_mask(own[i].pattern)) continue;
    const HeldBits held =
        bits_of_rows(layers.distinct[i], own[i], Span::range(0, rows), rank, layout_follows_documents(config));
    for (const PatternSpec* pattern : {&layers.distinct[i].pattern, &own[i].pattern}) {
      for_each_mask(*pattern, [&](const MaskSpec& mask) {
        if (!seen.insert(mask.given.get()).second) return;
        const bool shares = pattern == &own[i].pattern, made = mask.given->held != HeldBits();  // by a program
        bytes += shares ? mask.given->bytes_holding({}) : made ? mask.given->bytes() : mask.given->bytes_holding(held);
      });
    }
  }
  return bytes;
}

}  // namespace annulus
