// See legend.h.
#include "common/svg/legend.h"

#include <algorithm>

namespace annulus {

void Legend::item(const std::string& text, const std::function<void(int x, int middle)>& sample, int room) {
  const int before = room > 0 ? room + kBeside : 0;
  const int width = std::min(before + text_width(text, kFont), width_);
  if (at_.x > left_ && at_.x + width > left_ + width_) next_line();
  sample(at_.x, at_.y - 4);
  canvas_.text({at_.x + before, at_.y}, text, kFont, width - before, kInk);
  at_.x += width + kBetween;
}

void Legend::swatch(const std::string& text, std::string_view fill, std::string_view stroke) {
  item(
      text,
      [&](int x, int middle) {
        canvas_.box({x, middle - 6, 14, 12}, 2, fill, stroke);
      },
      14);
}

void Legend::stroke(const std::string& text, std::string_view color, std::string_view dash, bool arrow) {
  item(text, [&](int x, int middle) { canvas_.line(straight({x, middle}, {x + 36, middle}), color, 2, dash, arrow); });
}

void Legend::numbers(const std::string& name, int count, const std::function<std::string(int)>& color) {
  constexpr int kNamed = 8, kParts = 24, kPart = 6;
  for (int i = 0; i < count && count <= kNamed; ++i) swatch(name + " " + std::to_string(i), color(i));
  if (count <= kNamed) return;
  words(name + " 0");
  const auto sample = [&](int x, int middle) {
    for (int i = 0; i < kParts; ++i) {
      canvas_.box({x + i * kPart, middle - 6, kPart, 12}, 0, color(i * (count - 1) / (kParts - 1)), "none");
    }
  };
  item("to " + name + " " + std::to_string(count - 1), sample, kParts * kPart);
}

void Legend::words(const std::string& text) {
  item(
      text, [](int, int) {}, 0);
}

void Legend::next_line() { at_ = {left_, at_.y + kLine}; }

}  // namespace annulus
