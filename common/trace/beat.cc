// See beat.h.
#include "common/trace/beat.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/text.h"

namespace annulus {
namespace {

template <size_t size>
void put(char (&to)[size], std::string_view text) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

// The text of an array that another process has written.
template <size_t size>
std::string text_of(const char (&from)[size]) {
  return printable(std::string_view(from, strnlen(from, size)));
}

}  // namespace

namespace beat_internal {

void enter(BeatPage& page, const char* name, std::string_view detail, int16_t layer, int32_t hop, bool waits) {
  if (!is_main) {
    page.others.fetch_add(1, std::memory_order_release);
    return;
  }
  const uint32_t depth = page.depth.load(std::memory_order_relaxed);
  if (depth < BeatPage::kDeepest) {
    BeatPage::Place& place = page.places[depth];
    put(place.name, name);
    put(place.detail, detail);
    place.layer = layer;
    place.hop = hop;
    place.waits = waits;
  }
  page.depth.store(depth + 1, std::memory_order_release);
  count(page.own);
}

void leave(BeatPage& page) {
  if (!is_main) {
    page.others.fetch_add(1, std::memory_order_release);
    return;
  }
  page.depth.store(page.depth.load(std::memory_order_relaxed) - 1, std::memory_order_release);
  count(page.own);
}

}  // namespace beat_internal

void set_beat_page(BeatPage* page) {
  beat_internal::is_main = page != nullptr;
  if (page != nullptr) page->mark = BeatPage::kMark;
  beat_internal::page = page;
}

void beat_step(int64_t step) {
  if (BeatPage* const page = beat_internal::own_page()) page->step.store(step, std::memory_order_relaxed);
}

std::string place_of_beat(const BeatPage& page) {
  const int64_t step = page.step;
  const uint32_t depth = std::min<uint32_t>(page.depth, BeatPage::kDeepest);
  std::vector<std::string> names;
  std::string inside;
  const auto add = [&](const std::string& text) { inside += (inside.empty() ? "" : ", ") + text; };
  for (uint32_t i = 0; i < depth; ++i) {
    const BeatPage::Place& place = page.places[i];
    const std::string name = text_of(place.name);
    if (name == "step") continue;  // said already
    names.push_back(name);
    if (const std::string detail = text_of(place.detail); !detail.empty()) inside = detail;
  }
  if (depth > 0 && page.places[depth - 1].layer >= 0) add("layer " + std::to_string(page.places[depth - 1].layer));
  if (depth > 0 && page.places[depth - 1].hop >= 0) add("hop " + std::to_string(page.places[depth - 1].hop));
  std::string text = step == BeatPage::kNoStep ? "" : "step " + with_commas(step);
  if (!names.empty()) text += (text.empty() ? "" : ": ") + join(names, ", ");
  return inside.empty() ? text : text + " (" + inside + ")";
}

}  // namespace annulus
