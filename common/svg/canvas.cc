// See canvas.h.
#include "common/svg/canvas.h"

#include <algorithm>
#include <cstdint>

#include "common/text.h"
#include "common/utf8.h"

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

constexpr size_t kMostBytes = 4096;  // of one text

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// Whether XML allows the character, which is UTF-8 of `size` bytes but may be overlong or a surrogate.
bool may_stand(std::string_view character) {
  uint32_t code = static_cast<unsigned char>(character[0]);
  const size_t size = character.size();
  if (size == 1) return code >= 0x20 && code < 0x7f;
  code &= size == 2 ? 0x1f : size == 3 ? 0x0f : 0x07;
  for (size_t i = 1; i < size; ++i) code = code << 6 | (static_cast<unsigned char>(character[i]) & 0x3f);
  if (size == 2) return code >= 0xa0;
  if (size == 3) return code >= 0x800 && (code < 0xd800 || code >= 0xe000) && code < 0xfffe;
  return code >= 0x10000 && code < 0x110000;
}

std::string drawable(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t size = utf8_character(text, at);
    const bool good = size > 0 && may_stand(text.substr(at, size));
    out += good ? text.substr(at, size) : "?";
    at += std::max<size_t>(size, 1);
  }
  return out;
}

// Returns the text as it fits into `width` pixels, "" if fewer than two letters of it do.
std::string fitted(std::string_view text, int size, int width) {
  std::string fitting = drawable(text.substr(0, kMostBytes));
  if (text_width(fitting, size) <= width) return fitting;
  while (!fitting.empty() && text_width(fitting + "..", size) > width) {
    while (continues(fitting.back())) fitting.pop_back();
    fitting.pop_back();
  }
  return fitting.size() < 2 ? "" : fitting + "..";
}

// For a reader who prefers dark pages: light and dark change places, and hues stay, so that lines keep their ring's
// colour.
constexpr std::string_view kDark =
    "@media (prefers-color-scheme: dark) { svg { color-scheme: dark; filter: invert(0.9) hue-rotate(180deg) } }";

std::string attribute(std::string_view name, int value) { return attribute(name, std::to_string(value)); }

}  // namespace

// Widths in thousandths of the font size: capitals are wider than small letters and digits, and blanks narrower. Beyond
// ASCII only the number of bytes of a character is looked at: those of three and four may be as wide as high.
int text_width(std::string_view text, int size) {
  int width = 0;
  for (char c : text) {
    const bool wide = (c >= 'A' && c <= 'Z') || c == '_' || c == '@' || c == '%' || c == 'm' || c == 'w';
    const bool narrow = c == ' ' || c == '.' || c == ',' || c == ':' || c == 'i' || c == 'l' || c == '/';
    const auto byte = static_cast<unsigned char>(c);
    width += continues(c) ? 0 : byte >= 0xe0 ? 1000 : byte >= 0x80 || wide ? 780 : narrow ? 340 : 610;
  }
  return width * size / 1000;
}

std::string straight(Point from, Point to) {
  return "M" + std::to_string(from.x) + " " + std::to_string(from.y) + "L" + std::to_string(to.x) + " " +
         std::to_string(to.y);
}

void SvgCanvas::box(const Box& box, int radius, std::string_view fill, std::string_view stroke, int stroke_width) {
  body_ += "<rect" + attribute("x", box.x) + attribute("y", box.y) + attribute("width", box.width) +
           attribute("height", box.height) + (radius > 0 ? attribute("rx", radius) : "") + attribute("fill", fill);
  if (stroke != "none") body_ += attribute("stroke", stroke) + attribute("stroke-width", stroke_width);
  body_ += "/>\n";
}

void SvgCanvas::text(Point at, std::string_view text, int size, int width, std::string_view color, bool bold,
                     Anchor anchor) {
  const std::string fitting = fitted(text, size, bold ? width * 19 / 20 : width);
  if (fitting.empty()) return;
  body_ += "<text" + attribute("x", at.x) + attribute("y", at.y) + attribute("font-size", size) +
           attribute("fill", color) + (bold ? attribute("font-weight", "bold") : "") +
           (anchor == Anchor::kStart ? "" : attribute("text-anchor", anchor == Anchor::kMiddle ? "middle" : "end")) +
           ">" + escaped(fitting) + "</text>\n";
}

int SvgCanvas::paragraph(Point at, std::string_view words, int size, int width, std::string_view color) {
  std::string line;
  const auto end_line = [&] {
    text(at, line, size, width, color);
    at.y += size * 4 / 3;
    line.clear();
  };
  for (const std::string& word : split(words, ' ')) {
    if (!line.empty() && text_width(line + " " + word, size) > width) end_line();
    line += (line.empty() ? "" : " ") + word;
  }
  if (!line.empty()) end_line();
  return at.y;
}

void SvgCanvas::upward_text(Point at, std::string_view text, int size, int width, std::string_view color) {
  const std::string fitting = fitted(text, size, width);
  if (fitting.empty()) return;
  const std::string x = std::to_string(at.x), y = std::to_string(at.y);
  body_ += "<text" + attribute("x", x) + attribute("y", y) + attribute("font-size", size) + attribute("fill", color) +
           attribute("text-anchor", "middle") + attribute("transform", "rotate(-90 " + x + " " + y + ")") + ">" +
           escaped(fitting) + "</text>\n";
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

void SvgCanvas::area(std::string_view path, std::string_view fill, std::string_view stroke, double opacity) {
  body_ += "<path" + attribute("d", path) + attribute("fill", fill) + attribute("stroke", stroke) +
           (opacity < 1 ? attribute("fill-opacity", exact(opacity)) : "") + "/>\n";
}

void SvgCanvas::open(std::string_view description) {
  body_ += "<g>\n<title>" + escaped(drawable(description.substr(0, kMostBytes))) + "</title>\n";
}

void SvgCanvas::close() { body_ += "</g>\n"; }

void SvgCanvas::describe(std::string_view title, std::string_view description) {
  about_ = "<title>" + escaped(drawable(title)) + "</title>\n<desc>" + escaped(drawable(description)) + "</desc>\n";
}

std::string SvgCanvas::print(int width, int height) const {
  const std::string size = attribute("width", width) + attribute("height", height);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\"" + size +
         attribute("viewBox", "0 0 " + std::to_string(width) + " " + std::to_string(height)) +
         (about_.empty() ? "" : attribute("role", "img")) +
         " font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">\n" + about_ + "<style>" +
         std::string(kDark) + "</style>\n<defs>\n" + heads_ + "</defs>\n<rect" + size + " fill=\"#ffffff\"/>\n" +
         body_ + "</svg>\n";
}

}  // namespace annulus
