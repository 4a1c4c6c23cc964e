// Tests of launcher/topology/topology_svg.h by the geometry of the pictures: each rank and each hop is drawn, words fit
// into their boxes, boxes do not overlap partially, and no two lines between hosts coincide.
#include "launcher/topology/topology_svg.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/files.h"
#include "common/svg/canvas.h"
#include "tests/common/svg/parsed_svg.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::topology_svg_test {
namespace {

using testing::apart;
using testing::parse_svg;
using testing::ParsedPath;
using testing::ParsedSvg;
using testing::ParsedWord;
using testing::within;

constexpr PlacementOptions kCuda{.device = DeviceKind::kCuda};

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

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
  const ParsedSvg picture = parse_svg(topology_svg(hosts, placement));
  for (size_t i = 0; i < picture.boxes.size(); ++i) {
    const Box& a = picture.boxes[i];
    EXPECT_TRUE(within(a, picture.page));
    for (size_t j = 0; j < i; ++j) {
      const Box& b = picture.boxes[j];
      ASSERT_TRUE(within(a, b) || apart(a, b)) << a.x << "," << a.y << " and " << b.x << "," << b.y;
    }
  }
  for (size_t i = 0; i < picture.words.size(); ++i) {
    const ParsedWord& word = picture.words[i];
    EXPECT_TRUE(within(word.box, picture.page)) << word.text;
    for (const Box& box : picture.boxes) EXPECT_TRUE(within(word.box, box) || apart(word.box, box)) << word.text;
    for (size_t j = 0; j < i; ++j) EXPECT_TRUE(apart(word.box, picture.words[j].box)) << word.text;
  }
  for (const RankPlacement& rank : placement.ranks) {
    const std::string number = std::to_string(rank.rank);
    const auto shown = std::count_if(picture.words.begin(), picture.words.end(), [&](const ParsedWord& word) {
      return word.text == number || word.text == "rank " + number;
    });
    EXPECT_EQ(shown, 1) << number;
  }
  std::vector<Segment> all;
  int64_t inside = 0, between = 0;
  for (const ParsedPath& path : picture.paths) {
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
      << "make it again: tools/pictures.py --program .bazel/bin/launcher/annulus";
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
  const ParsedSvg picture = parse_svg(topology_svg(hosts, place(hosts, 280, kCuda)));
  EXPECT_EQ(picture.count("70 hosts, 280 ranks on GPUs, 1 ring of 280"), 1);
  EXPECT_EQ(picture.count("the first 64 hosts are drawn"), 1);
  EXPECT_EQ(picture.count("255"), 1);
  EXPECT_EQ(picture.count("256"), 0);
}

TEST(TopologySvg, ColoursShowRingsAndDashesShowLinks) {
  const Machine socket = load("one_socket_gpus.xml");
  const ParsedSvg rings =
      parse_svg(topology_svg({socket}, place({socket}, 4, {.device = DeviceKind::kCuda, .context = 2})));
  std::map<std::string, int> arcs;
  for (const ParsedPath& path : rings.paths) {
    if (path.d.find('C') == std::string::npos) continue;
    ++arcs[path.color];
    EXPECT_EQ(path.dash, "") << "NVLink";
  }
  ASSERT_EQ(arcs.size(), 2U);
  for (const auto& [color, count] : arcs) EXPECT_EQ(count, 2);

  const Machine dgx = load("dgx.xml");
  std::map<std::string, int> dashes;
  for (const ParsedPath& path : parse_svg(topology_svg({dgx}, place({dgx}, 8, kCuda))).paths) {
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
  EXPECT_EQ(testing::xml_fault(svg), "");
  EXPECT_NE(svg.find("&lt;a href=&quot;x&quot;&gt;&amp;??www"), std::string::npos);
  EXPECT_EQ(svg.find("<a"), std::string::npos);
  EXPECT_LT(svg.size(), 20000U);
}

}  // namespace
}  // namespace annulus::topology_svg_test
