// Operators of torch.ops.annulus that make masks of tokens from tensors and release them (masks.h), and those that say
// which positions a rank has. python/annulus calls them.
#include "python/ops/masks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "common/text.h"
#include "python/ops/call.h"
#include "python/ops/world.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;
using MaskPointer = std::shared_ptr<const TokenMask>;

struct Masks {
  std::mutex mutex;
  std::multimap<std::string, std::weak_ptr<const TokenMask>> by_digest;  // the latest one last
  std::map<int64_t, MaskPointer> kept;                                   // by the number that Python has
  int64_t next = 1;
};
Masks& masks() {
  static Masks& all = *new Masks;  // never destroyed, because threads may outlive static objects
  return all;
}

std::vector<MaskPointer> find_masks(const std::string& digest) {
  Masks& all = masks();
  const std::lock_guard lock(all.mutex);
  std::vector<MaskPointer> found;  // the latest one first
  const auto [first, past] = all.by_digest.equal_range(digest);
  for (auto it = past; it != first;) {
    if (MaskPointer mask = (--it)->second.lock()) found.push_back(std::move(mask));
  }
  return found;
}

MaskPointer find_mask(const std::string& digest, const HeldBits& bits) {
  const std::vector<MaskPointer> found = find_masks(digest);
  const auto holds = [&](const MaskPointer& mask) {
    return mask->held.all || (!bits.all && std::ranges::none_of(bits.parts, [&](const HeldBits::Part& part) {
             return mask->query_without_bits(part).has_value();
           }));
  };
  const auto best = std::find_if(found.begin(), found.end(), holds);
  return best != found.end() ? *best : found.empty() ? nullptr : found.front();
}

PlanRequest request_of(const std::string& layout, int64_t queries, int64_t keys, int64_t heads, int64_t ranks) {
  PlanRequest request{
      .shape = aligned({.batch = 1, .heads = heads, .kv_heads = heads, .q_len = queries, .k_len = keys}),
      .pattern = {},
      .ranks = static_cast<int>(ranks)};
  set_layout(request, layout);
  require_dealt(request);
  return request;
}

// How a mask is to be used.
struct Use {
  std::string group, layout;
  std::optional<std::vector<int64_t>> lengths;
  std::string schedule;
  int64_t within;
};

// The bits that this rank needs of a mask with `heads` heads or, if that is 1, with one for all heads.
HeldBits bits_of_use(int64_t queries, int64_t keys, int64_t heads, const Use& use) {
  const Place place = place_in(use.group);
  if (place.size == 1) return HeldBits::everything();
  require(use.lengths || !use.layout.empty(),
          "give the layout in which the queries are cut among the " + std::to_string(place.size) +
              " ranks, such as layout=\"zigzag\", or the annulus.Sharding: a rank holds the bits of its own queries");
  // Any number of heads that ranks can divide does for a mask that all heads share.
  PlanRequest request =
      request_of(use.lengths ? "" : use.layout, queries, keys, heads == 1 ? place.size : heads, place.size);
  set_schedule(request, use.schedule, use.within);
  if (use.lengths) request.uneven_lengths = *use.lengths;
  return needed_bits(request, static_cast<int>(place.rank));
}

// This rank's positions in the order of its rows, int64.
Tensor layout_positions(std::string layout, int64_t length, int64_t rank, int64_t size) {
  require(length >= 0 && size >= 1 && rank >= 0 && rank < size,
          "expected a length of at least 0 and a rank below size, but they are " + std::to_string(length) + ", " +
              std::to_string(rank) + " and " + std::to_string(size));
  return at::tensor(query_layout(request_of(layout, length, length, 1, size)).positions(static_cast<int>(rank)),
                    at::TensorOptions(at::kLong));
}

// Returns the mask's digest, and the number by which release_mask knows it.
std::tuple<std::string, int64_t> token_mask(const Tensor& shown, std::string group, std::string layout,
                                            std::optional<std::vector<int64_t>> lengths, std::string schedule,
                                            int64_t within) {
  require(shown.defined() && shown.layout() == at::kStrided && !shown.is_meta(),
          "a mask must be a dense tensor with content");
  require(shown.scalar_type() == at::kBool || shown.scalar_type() == at::kByte,
          std::string("a mask must be bool or uint8, true where a query sees a key, but is ") +
              c10::toString(shown.scalar_type()) +
              ": numbers that are added to scores are no mask; for one of 0 and -inf pass mask == 0");
  require(shown.dim() == 4, "a mask must be [batch or 1, heads or 1, queries, keys], but has the shape " +
                                list_text(shown.sizes().vec()) +
                                ": for one of [queries, keys] pass mask[None, None], for [batch, queries, "
                                "keys] mask[:, None]; padding, [batch, keys], is given as kept_keys");
  const Tensor here = shown.cpu();
  Tensor rows;
  const int64_t heads = here.size(1);
  const MaskRows read = [&](int64_t number, int64_t first, int64_t count) {
    rows = here.select(0, number / heads).select(0, number % heads).narrow(0, first, count).contiguous();
    return static_cast<const uint8_t*>(rows.const_data_ptr());
  };
  auto mask = std::make_shared<const TokenMask>(make_token_mask(
      here.size(0), heads, here.size(2), here.size(3), read,
      bits_of_use(here.size(2), here.size(3), heads, {group, layout, lengths, schedule, within}), "the mask"));
  Masks& all = masks();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_digest, [](const auto& entry) { return entry.second.expired(); });
  all.by_digest.emplace(mask->digest, mask);
  const std::string digest = mask->digest;
  all.kept[all.next] = std::move(mask);
  return {digest, all.next++};
}

void release_mask(int64_t number) {
  MaskPointer last;  // is destroyed after the lock
  Masks& all = masks();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.kept.find(number); found != all.kept.end()) {
    last = std::move(found->second);
    all.kept.erase(found);
  }
}

}  // namespace

PatternSpec with_known_masks(PatternSpec spec, const HeldBits& bits) {
  for (PatternSpec& member : spec.members) member = with_known_masks(std::move(member), bits);
  if (spec.mask.file.empty() && !spec.mask.digest.empty() && !spec.mask.given) {
    spec.mask.given = find_mask(spec.mask.digest, bits);
  }
  return spec;
}

std::vector<MaskPointer> known_masks(const PatternSpec& spec) {
  std::vector<MaskPointer> found;
  for (const PatternSpec& member : spec.members) {
    for (MaskPointer& mask : known_masks(member)) found.push_back(std::move(mask));
  }
  if (spec.mask.file.empty() && !spec.mask.digest.empty()) {
    for (MaskPointer& mask : find_masks(spec.mask.digest)) found.push_back(std::move(mask));
  }
  return found;
}

TORCH_LIBRARY_FRAGMENT(annulus, m) {
  // Makes a mask of tokens of `shown`, bool or uint8 [batch or 1, heads or 1, queries, keys], of whole rows and the
  // same on all ranks. This rank holds the bits of its own queries, and with a schedule that moves queries of those
  // that it computes. Not collective. Returns the digest that a pattern names as mask_digest, and the number with which
  // release_mask releases the mask.
  m.def(
      "token_mask(Tensor shown, *, str group=\"\", str layout=\"\", int[]? lengths=None, str schedule=\"auto\", "
      "int within=0) -> (str digest, int number)",
      token_mask);
  m.def("release_mask(int number) -> ()", release_mask);
  // The positions of one rank of `size` in rows of this length, and the name of a layout that is dealt by a pattern,
  // with the documents of cu_seqlens, for any argument `layout`. Not collective.
  m.def("layout_positions(str layout, int length, int rank, int size) -> Tensor", layout_positions);
  m.def("dealt_by(str layout, str pattern, Tensor? cu_seqlens=None) -> str", dealt_by);
}

}  // namespace annulus::torch_ops
