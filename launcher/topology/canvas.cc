// See canvas.h.
#include "launcher/topology/canvas.h"

#include <algorithm>

#include "common/text.h"

namespace annulus {
namespace {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : std::string(1, c);
  }
  return out;
}

std::string attribute(std::string_view name, std::string_view value) {
  return " " + std::string(name) + "=\"" + std::string(value) + "\"";
}

// For a reader who prefers dark pages: light and dark change places, and hues stay, so that lines keep their ring's
// colour.
constexpr std::string_view kDark =
    "@media (prefers-color-scheme: dark) { svg { color-scheme: dark; filter: invert(0.9) hue-rotate(180deg) } }";

std::string attribute(std::string_view name, int value) { return attribute(name, std::to_string(value)); }

}  // namespace

// Widths in thousandths of the font size: capitals are wider than small letters and digits, and blanks narrower.
int text_width(std::string_view text, int size) {
  int width = 0;
  for (char c : text) {
    const bool wide = (c >= 'A' && c <= 'Z') || c == '_' || c == '@' || c == '%' || c == 'm' || c == 'w';
    const bool narrow = c == ' ' || c == '.' || c == ',' || c == ':' || c == 'i' || c == 'l' || c == '/';
    width += wide ? 780 : narrow ? 340 : 610;
  }
  return width * size / 1000;
}

std::string straight(Point from, Point to) {
  return "M" + std::to_string(from.x) + " " + std::to_string(from.y) + "L" + std::to_string(to.x) + " " +
         std::to_string(to.y);
}

void SvgCanvas::box(const Box& box, int radius, std::string_view fill, std::string_view stroke, int stroke_width) {
  body_ += "<rect" + attribute("x", box.x) + attribute("y", box.y) + attribute("width", box.width) +
           attribute("height", box.height) + attribute("rx", radius) + attribute("fill", fill) +
           attribute("stroke", stroke) + attribute("stroke-width", stroke_width) + "/>\n";
}

void SvgCanvas::text(Point at, std::string_view text, int size, int width, std::string_view color, bool bold,
                     Anchor anchor) {
  std::string fitting = printable(text);
  const int room = bold ? width * 19 / 20 : width;
  if (text_width(fitting, size) > room) {
    while (!fitting.empty() && text_width(fitting + "..", size) > room) fitting.pop_back();
    if (fitting.size() < 2) return;
    fitting += "..";
  }
  body_ += "<text" + attribute("x", at.x) + attribute("y", at.y) + attribute("font-size", size) +
           attribute("fill", color) + (bold ? attribute("font-weight", "bold") : "") +
           (anchor == Anchor::kMiddle ? attribute("text-anchor", "middle") : "") + ">" + escaped(fitting) + "</text>\n";
}

std::string SvgCanvas::arrow_of(std::string_view color) {
  std::string id = "head-" + std::string(color.substr(1));
  if (heads_.find("\"" + id + "\"") == std::string::npos) {
    heads_ += "<marker" + attribute("id", id) +
              " viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"9\" markerHeight=\"9\" "
              "markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0.8L8 4L0 7.2z\"" +
              attribute("fill", color) + "/></marker>\n";
  }
  return id;
}

void SvgCanvas::line(std::string_view path, std::string_view color, int width, std::string_view dash, bool arrow) {
  body_ += "<path" + attribute("d", path) + attribute("fill", "none") + attribute("stroke", color) +
           attribute("stroke-width", width) + (dash.empty() ? "" : attribute("stroke-dasharray", dash)) +
           attribute("stroke-linejoin", "round") +
           (arrow ? attribute("marker-end", "url(#" + arrow_of(color) + ")") : "") + "/>\n";
}

std::string SvgCanvas::print(int width, int height) const {
  const std::string size = attribute("width", width) + attribute("height", height);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\"" + size +
         attribute("viewBox", "0 0 " + std::to_string(width) + " " + std::to_string(height)) +
         " font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">\n<style>" + std::string(kDark) +
         "</style>\n<defs>\n" + heads_ + "</defs>\n<rect" + size + " fill=\"#ffffff\"/>\n" + body_ + "</svg>\n";
}

}  // namespace annulus
