// See parsed_svg.h.
#include "tests/common/svg/parsed_svg.h"

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <utility>

#include "common/utf8.h"

namespace annulus::testing {
namespace {

std::map<std::string, std::string> attributes(const std::string& element) {
  static const std::regex form("([a-z-]+)=\"([^\"]*)\"");
  std::map<std::string, std::string> out;
  for (std::sregex_iterator it(element.begin(), element.end(), form), end; it != end; ++it) out[(*it)[1]] = (*it)[2];
  return out;
}

std::string unescaped(std::string text) {
  for (const auto& [code, character] : {std::pair("&lt;", "<"), {"&gt;", ">"}, {"&quot;", "\""}, {"&amp;", "&"}}) {
    text = std::regex_replace(text, std::regex(code), character);
  }
  return text;
}

// What is wrong with text between elements, or with an attribute's value.
std::string text_fault(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = utf8_character(text, at);
    if (size == 0) return "a byte that is not UTF-8";
    if (size == 1 && static_cast<unsigned char>(text[at]) < ' ' && text[at] != '\n') return "a control character";
    if (text[at] == '<') return "a '<' in a text";
    if (text[at] == '&') {
      const std::string rest = text.substr(at, 6);
      if (!rest.starts_with("&lt;") && !rest.starts_with("&gt;") && !rest.starts_with("&amp;") && rest != "&quot;") {
        return "an '&' that begins no entity";
      }
    }
    at += size;
  }
  return "";
}

}  // namespace

int64_t ParsedSvg::count(const std::string& text) const {
  return std::count_if(words.begin(), words.end(), [&](const ParsedWord& word) { return word.text == text; });
}

// The writer puts one element on each line.
ParsedSvg parse_svg(const std::string& svg) {
  ParsedSvg picture;
  std::istringstream lines(svg);
  bool defs = false;
  for (std::string line; std::getline(lines, line);) {
    defs = (defs || line == "<defs>") && line != "</defs>";
    const std::string element = line.substr(0, line.find('>'));
    auto a = attributes(element);
    const auto number = [&](const char* name) { return a.contains(name) ? std::stoi(a[name]) : 0; };
    if (defs || line.empty()) continue;
    if (line.starts_with("<svg")) picture.page = {0, 0, number("width"), number("height")};
    if (line.starts_with("<rect") && a.contains("x")) {
      picture.boxes.push_back({{number("x"), number("y"), number("width"), number("height")}, a["fill"]});
    }
    if (line.starts_with("<path")) {
      picture.paths.push_back({a["d"], a["stroke"], a["stroke-dasharray"], a["fill"], a.contains("marker-end")});
    }
    const auto content = [&](const std::string& end) {
      const size_t begin = line.find('>') + 1;
      return unescaped(line.substr(begin, line.rfind(end) - begin));
    };
    if (line.starts_with("<title")) picture.titles.push_back(content("</title>"));
    if (line.starts_with("<desc")) picture.description = content("</desc>");
    if (line.starts_with("<text")) {
      const std::string text = content("</text>");
      const int size = number("font-size"), width = text_width(text, size);
      const int before = a["text-anchor"] == "middle" ? width / 2 : a["text-anchor"] == "end" ? width : 0;
      Box box{number("x") - before, number("y") - size * 3 / 4, width, size};
      if (a.contains("transform")) box = {number("x") - size * 3 / 4, number("y") - width / 2, size, width};
      picture.words.push_back({box, text, a["fill"]});
    }
  }
  return picture;
}

std::vector<double> numbers_of(const std::string& path) {
  static const std::regex form("-?[0-9]+(\\.[0-9]+)?");
  std::vector<double> out;
  for (std::sregex_iterator it(path.begin(), path.end(), form), end; it != end; ++it)
    out.push_back(std::stod(it->str()));
  return out;
}

std::string layout_fault(const ParsedSvg& picture) {
  for (const ParsedBox& box : picture.boxes) {
    if (!within(box, picture.page)) return "a box leaves the page";
  }
  for (const ParsedPath& path : picture.paths) {
    for (const double number : numbers_of(path.d)) {
      const double most = std::max(picture.page.width, picture.page.height);
      if (!(number >= 0 && number <= most)) return "a line leaves the page: " + path.d;
    }
  }
  for (size_t i = 0; i < picture.words.size(); ++i) {
    const ParsedWord& word = picture.words[i];
    if (!within(word.box, picture.page)) return "a text leaves the page: " + word.text;
    for (size_t j = 0; j < i; ++j) {
      const ParsedWord& other = picture.words[j];
      if (!apart(word.box, other.box)) return "texts overlap: " + word.text + " and " + other.text;
    }
  }
  return "";
}

bool within(const Box& inner, const Box& outer) {
  return inner.x >= outer.x && inner.y >= outer.y && inner.right() <= outer.right() && inner.bottom() <= outer.bottom();
}

bool apart(const Box& a, const Box& b) {
  return a.right() <= b.x || b.right() <= a.x || a.bottom() <= b.y || b.bottom() <= a.y;
}

std::string xml_fault(const std::string& text) {
  static const std::regex tag("<(/?)([a-zA-Z]+)((?:\\s+[a-zA-Z:-]+=\"[^\"]*\")*)\\s*(/?)>");
  static const std::regex attribute("([a-zA-Z:-]+)=\"([^\"]*)\"");
  std::vector<std::string> open;
  bool root = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = std::min(text.find('<', at), text.size());
    const std::string between = text.substr(at, begin - at);
    if (const std::string fault = text_fault(between); !fault.empty()) return fault + ": " + between;
    if (open.empty() && between.find_first_not_of('\n') != std::string::npos) return "a text outside of the root";
    if (begin == text.size()) break;
    std::smatch m;
    const std::string rest = text.substr(begin, text.find('>', begin) + 1 - begin);
    if (!std::regex_match(rest, m, tag)) return "no tag: " + rest;
    const std::string name = m[2], values = m[3];
    const bool closes = m[1].length() > 0, empty = m[4].length() > 0;
    std::set<std::string> names;
    for (std::sregex_iterator it(values.begin(), values.end(), attribute), end; it != end; ++it) {
      if (!names.insert((*it)[1]).second) return "an attribute twice: " + rest;
      if (const std::string fault = text_fault((*it)[2]); !fault.empty()) return fault + ": " + rest;
    }
    if (closes) {
      if (open.empty() || open.back() != name) return "closes what is not open: " + rest;
      open.pop_back();
    } else {
      if (open.empty() && std::exchange(root, true)) return "a second root: " + rest;
      if (!empty) open.push_back(name);
    }
    at = begin + rest.size();
  }
  if (!open.empty()) return "not closed: " + open.back();
  return root ? "" : "no root";
}

}  // namespace annulus::testing
