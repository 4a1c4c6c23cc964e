// Reads the SVG documents that SvgCanvas writes, for tests of pictures by their geometry, and checks that a text is
// well-formed XML. Used by tests of common/svg, attention/execution,
// launcher/topology and runtime/evaluation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/svg/canvas.h"

namespace annulus::testing {

struct ParsedBox : Box {
  std::string fill;
};
struct ParsedWord {
  Box box;  // by text_width, an upper estimate
  std::string text, color;
};
struct ParsedPath {
  std::string d, color, dash, fill;
  bool arrow = false;
};
struct ParsedSvg {
  Box page;
  std::vector<ParsedBox> boxes;
  std::vector<ParsedWord> words;
  std::vector<ParsedPath> paths;
  std::vector<std::string> titles;  // of groups, which a reader sees on hover; the first one may be the picture's
  std::string description;

  // Returns how many texts are equal to this one.
  int64_t count(const std::string& text) const;
};

ParsedSvg parse_svg(const std::string& svg);

// Returns the numbers of a path in their order: "M1 2.5L3 4" gives 1, 2.5, 3, 4.
std::vector<double> numbers_of(const std::string& path);

// Returns what is wrong with the layout of a chart, and "" if nothing is: something that leaves the page, or two texts
// that overlap.
std::string layout_fault(const ParsedSvg& picture);

bool within(const Box& inner, const Box& outer);
bool apart(const Box& a, const Box& b);

// Returns what makes a text no well-formed XML document, and "" if nothing does: elements that do not nest, attributes
// twice, characters and entities that XML does not allow, more than one root. It knows what SvgCanvas may write: no
// comments, declarations or CDATA.
std::string xml_fault(const std::string& text);

}  // namespace annulus::testing
