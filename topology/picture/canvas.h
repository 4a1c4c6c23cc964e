// Shapes and words of a picture in SVG. Within this room only.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

struct Point {
  int x = 0;
  int y = 0;
};

struct Box {
  int x = 0, y = 0, width = 0, height = 0;
  int right() const { return x + width; }
  int bottom() const { return y + height; }
  Point top_middle() const { return {x + width / 2, y}; }
  Point bottom_middle() const { return {x + width / 2, bottom()}; }
};

// How wide `text` is at most, in any of the usual fonts without serifs.
int text_width(std::string_view text, int size);

class SvgCanvas {
 public:
  void box(const Box& box, int radius, std::string_view fill, std::string_view stroke, int stroke_width = 1);
  enum class Anchor { kStart, kMiddle };
  // Shortened to `width`; nothing where not even two letters fit.
  void text(Point at, std::string_view text, int size, int width, std::string_view color, bool bold = false,
            Anchor anchor = Anchor::kStart);
  // `path`: the "d" of SVG. `dash` as stroke-dasharray, "" for none; `arrow`: with a head at its end.
  void line(std::string_view path, std::string_view color, int width, std::string_view dash, bool arrow);

  // The whole file.
  std::string print(int width, int height) const;

 private:
  std::string arrow_of(std::string_view color);

  std::string body_, heads_;
};

}  // namespace annulus
