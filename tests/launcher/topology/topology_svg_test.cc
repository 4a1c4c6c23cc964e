// Tests of launcher/topology/topology_svg.h by the geometry of the pictures: each rank and each hop is drawn, words fit
// into their boxes, boxes do not overlap partially, and no two lines between hosts coincide.
#include "launcher/topology/topology_svg.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/files.h"
#include "launcher/topology/canvas.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::topology_svg_test {
namespace {

constexpr PlacementOptions kCuda{.device = DeviceKind::kCuda};

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

struct Word {
  Box box;
  std::string text;
};
struct Path {
  std::string d, color, dash;
  bool arrow = false;
};
struct Picture {
  Box page;
  std::vector<Box> boxes;
  std::vector<Word> words;
  std::vector<Path> paths;
};

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

// Parses the picture; the writer puts one element on each line.
Picture parse(const std::string& svg) {
  Picture picture;
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
      picture.boxes.push_back({number("x"), number("y"), number("width"), number("height")});
    }
    if (line.starts_with("<path")) {
      picture.paths.push_back({a["d"], a["stroke"], a["stroke-dasharray"], a.contains("marker-end")});
    }
    if (line.starts_with("<text")) {
      const size_t begin = line.find('>') + 1;
      const std::string text = unescaped(line.substr(begin, line.rfind("</text>") - begin));
      const int size = number("font-size"), width = text_width(text, size);
      const int x = number("x") - (a["text-anchor"] == "middle" ? width / 2 : 0);
      picture.words.push_back({{x, number("y") - size * 3 / 4, width, size}, text});
    }
  }
  return picture;
}

bool within(const Box& inner, const Box& outer) {
  return inner.x >= outer.x && inner.y >= outer.y && inner.right() <= outer.right() && inner.bottom() <= outer.bottom();
}

bool apart(const Box& a, const Box& b) {
  return a.right() <= b.x || b.right() <= a.x || a.bottom() <= b.y || b.bottom() <= a.y;
}

struct Segment {
  int fixed, from, to;
  bool level;
};

// The segments of a path such as "M1 2V3H4V5".
std::vector<Segment> segments(const std::string& d) {
  std::vector<Segment> out;
  int x = 0, y = 0;
  for (size_t at = 1; at < d.size();) {
    const char command = d[at - 1];
    size_t used = 0;
    const int value = std::stoi(d.substr(at), &used);
    at += used;
    if (command == 'M') {
      x = value;
      y = std::stoi(d.substr(at + 1), &used);
      at += 1 + used;
    } else if (command == 'V') {
      out.push_back({x, std::min(y, value), std::max(y, value), false});
      y = value;
    } else {
      out.push_back({y, std::min(x, value), std::max(x, value), true});
      x = value;
    }
    ++at;
  }
  return out;
}

void check(const std::vector<Machine>& hosts, const Placement& placement) {
  const Picture picture = parse(topology_svg(hosts, placement));
  for (size_t i = 0; i < picture.boxes.size(); ++i) {
    const Box& a = picture.boxes[i];
    EXPECT_TRUE(within(a, picture.page));
    for (size_t j = 0; j < i; ++j) {
      const Box& b = picture.boxes[j];
      ASSERT_TRUE(within(a, b) || apart(a, b)) << a.x << "," << a.y << " and " << b.x << "," << b.y;
    }
  }
  for (size_t i = 0; i < picture.words.size(); ++i) {
    const Word& word = picture.words[i];
    EXPECT_TRUE(within(word.box, picture.page)) << word.text;
    for (const Box& box : picture.boxes) EXPECT_TRUE(within(word.box, box) || apart(word.box, box)) << word.text;
    for (size_t j = 0; j < i; ++j) EXPECT_TRUE(apart(word.box, picture.words[j].box)) << word.text;
  }
  for (const RankPlacement& rank : placement.ranks) {
    const std::string number = std::to_string(rank.rank);
    const auto shown = std::count_if(picture.words.begin(), picture.words.end(), [&](const Word& word) {
      return word.text == number || word.text == "rank " + number;
    });
    EXPECT_EQ(shown, 1) << number;
  }
  std::vector<Segment> all;
  int64_t inside = 0, between = 0;
  for (const Path& path : picture.paths) {
    inside += path.arrow && path.d.find('C') != std::string::npos ? 1 : 0;
    if (!path.arrow || path.d.find('V') == std::string::npos) continue;
    ++between;
    for (const Segment& segment : segments(path.d)) {
      for (const Segment& other : all) {
        const bool meet = segment.level == other.level && segment.fixed == other.fixed && segment.from <= other.to &&
                          other.from <= segment.to;
        EXPECT_FALSE(meet) << path.d;
      }
    }
    const std::vector<Segment> own = segments(path.d);
    all.insert(all.end(), own.begin(), own.end());
  }
  const auto network =
      std::count_if(placement.hops.begin(), placement.hops.end(), [](const Hop& hop) { return hop.other_host; });
  EXPECT_EQ(between, network);
  EXPECT_EQ(inside, static_cast<int64_t>(placement.hops.size()) - network);
}

TEST(TopologySvg, DrawsDescribedMachines) {
  const Machine dgx = load("dgx.xml"), node = load("h200_node.xml"), socket = load("one_socket_gpus.xml");
  for (const Machine& machine : {dgx, node}) check({machine}, place({machine}, 8, kCuda));
  check({socket}, place({socket}, 4, {.device = DeviceKind::kCuda, .context = 2}));
  check({socket}, place({socket}, 6, {}));
  check({dgx, dgx}, place({dgx, dgx}, 16, kCuda));
  check({dgx, socket, node}, place({dgx, socket, node}, 18, {.device = DeviceKind::kCuda, .context = 6}));
  check({dgx, socket, node}, place({dgx, socket, node}, std::vector<int>{3, 0, 2}, kCuda));
}

TEST(TopologySvg, PictureOfTheUserGuideIsCurrent) {
  const std::vector<Machine> hosts(2, load("h200_node.xml"));
  EXPECT_TRUE(read_small_file("test", "docs/pictures/rings.svg") == topology_svg(hosts, place(hosts, 16, kCuda)))
      << "make it again: ./annulus topology --xml tests/launcher/topology/testdata/h200_node.xml --xml "
         "tests/launcher/topology/testdata/h200_node.xml -n 16 --svg docs/pictures/rings.svg";
}

TEST(TopologySvg, DrawsManyHosts) {
  const std::vector<Machine> hosts(32, load("dgx.xml"));
  for (int context : {1, 8, 64, 256})
    check(hosts, place(hosts, 256, {.device = DeviceKind::kCuda, .context = context}));
  const std::vector<Machine> unlike(7, load("one_socket_gpus.xml"));
  check(unlike, place(unlike, 24, {.device = DeviceKind::kCuda, .context = 6}));
}

TEST(TopologySvg, DrawsMadeUpMachines) {
  for (int nodes = 1; nodes <= 3; ++nodes) {
    for (int gpus = 0; gpus <= 3; ++gpus) {
      const Machine machine = Machine::from_xml_text(
          testing::to_xml({.packages = 2, .nodes_per_package = nodes, .gpus = {gpus, 2}, .nics_per_package = gpus}),
          "m");
      check({machine, machine}, place({machine, machine}, 4, kCuda));
      for (int ranks : {1, 5, 20}) check({machine}, place({machine}, ranks, {}));
    }
  }
}

TEST(TopologySvg, DrawsAtMostTheFirst64Hosts) {
  const std::vector<Machine> hosts(70, load("one_socket_gpus.xml"));
  const Picture picture = parse(topology_svg(hosts, place(hosts, 280, kCuda)));
  const auto said = [&](const std::string& text) {
    return std::any_of(picture.words.begin(), picture.words.end(), [&](const Word& w) { return w.text == text; });
  };
  EXPECT_TRUE(said("70 hosts, 280 ranks on GPUs, 1 ring of 280"));
  EXPECT_TRUE(said("the first 64 hosts are drawn"));
  EXPECT_TRUE(said("255"));
  EXPECT_FALSE(said("256"));
}

TEST(TopologySvg, ColoursShowRingsAndDashesShowLinks) {
  const Machine socket = load("one_socket_gpus.xml");
  const Picture rings = parse(topology_svg({socket}, place({socket}, 4, {.device = DeviceKind::kCuda, .context = 2})));
  std::map<std::string, int> arcs;
  for (const Path& path : rings.paths) {
    if (path.d.find('C') == std::string::npos) continue;
    ++arcs[path.color];
    EXPECT_EQ(path.dash, "") << "NVLink";
  }
  ASSERT_EQ(arcs.size(), 2U);
  for (const auto& [color, count] : arcs) EXPECT_EQ(count, 2);

  const Machine dgx = load("dgx.xml");
  std::map<std::string, int> dashes;
  for (const Path& path : parse(topology_svg({dgx}, place({dgx}, 8, kCuda))).paths) {
    if (path.d.find('C') != std::string::npos) ++dashes[path.dash];
  }
  EXPECT_EQ(dashes, (std::map<std::string, int>{{"7 3", 6}, {"2 3", 2}})) << "two of eight hops change the package";
}

TEST(TopologySvg, NamesAreShortenedAndEscaped) {
  Machine machine = load("one_socket_gpus.xml");
  machine.host = "<a href=\"x\">&\x1b\xff" + std::string(5000, 'w');
  machine.packages[1].model = std::string(500, 'M');
  machine.nics[0].name = std::string(500, '_');
  check({machine}, place({machine}, 4, kCuda));
  const std::string svg = topology_svg({machine}, place({machine}, 4, kCuda));
  EXPECT_NE(svg.find("&lt;a href=&quot;x&quot;&gt;&amp;??www"), std::string::npos);
  EXPECT_EQ(svg.find("<a"), std::string::npos);
  EXPECT_LT(svg.size(), 20000U);
}

}  // namespace
}  // namespace annulus::topology_svg_test
