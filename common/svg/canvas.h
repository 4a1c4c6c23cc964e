// Draws boxes, lines and text into an SVG picture. Used by charts (line_chart.h, heat_map.h, stacked_bars.h) and by the
// pictures of a job's ranks (launcher/topology/topology_svg.h) and of plans (attention/execution/plan_svg.h). A class
// for one thread.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

// The colours of text.
inline constexpr std::string_view kInk = "#1f2933";
inline constexpr std::string_view kFaint = "#52606d";

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

// Returns an upper estimate, in pixels, of the width of `text` in common sans-serif fonts of this size.
int text_width(std::string_view text, int size);

// Returns the path of a straight line.
std::string straight(Point from, Point to);

class SvgCanvas {
 public:
  void box(const Box& box, int radius, std::string_view fill, std::string_view stroke, int stroke_width = 1);
  enum class Anchor { kStart, kMiddle, kEnd };
  // Draws `text`, truncated to `width` pixels; nothing if fewer than two letters would be left of it. Characters that
  // XML does not allow, and bytes that are not UTF-8, become '?'.
  void text(Point at, std::string_view text, int size, int width, std::string_view color, bool bold = false,
            Anchor anchor = Anchor::kStart);
  // Draws text in as many lines of `width` pixels as it needs, and returns the y coordinate of the line after the last.
  int paragraph(Point at, std::string_view text, int size, int width, std::string_view color);
  // Draws as text() does, but from bottom to top, with the middle of the text at `at`.
  void upward_text(Point at, std::string_view text, int size, int width, std::string_view color);
  // `path` is SVG's attribute "d", `dash` its stroke-dasharray ("" for a solid line); `arrow` adds a head at the end.
  void line(std::string_view path, std::string_view color, int width, std::string_view dash, bool arrow);
  // Fills the inside of a path; `opacity` (0 to 1) is that of the inside, not of the stroke.
  void area(std::string_view path, std::string_view fill, std::string_view stroke, double opacity = 1);

  // What is drawn until close() is one thing, whose description a reader sees when the pointer rests on it.
  void open(std::string_view description);
  void close();
  // The title of the whole picture, and what it shows, in words: for those who cannot see it.
  void describe(std::string_view title, std::string_view description);

  // Returns the SVG document.
  std::string print(int width, int height) const;

 private:
  std::string arrow_of(std::string_view color);

  std::string body_, heads_, about_;
};

}  // namespace annulus
