// Tests of common/svg/canvas.h: which characters a text keeps, where it is cut, and that documents are XML.
#include "common/svg/canvas.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/common/svg/parsed_svg.h"

namespace annulus::canvas_test {
namespace {

using testing::parse_svg;
using testing::xml_fault;

std::string drawn(const std::string& text, int width = 1000) {
  SvgCanvas canvas;
  canvas.text({10, 20}, text, 12, width, kInk);
  const std::string svg = canvas.print(2000, 40);
  EXPECT_EQ(xml_fault(svg), "");
  const auto words = parse_svg(svg).words;
  return words.empty() ? "" : words[0].text;
}

TEST(SvgCanvas, TextKeepsWhatXmlAllows) {
  EXPECT_EQ(drawn("a <b> & \"c\""), "a <b> & \"c\"");
  EXPECT_EQ(drawn("\xce\xbb = 3, \xe6\x96\x87, \xf0\x9f\x98\x80"), "\xce\xbb = 3, \xe6\x96\x87, \xf0\x9f\x98\x80");
  EXPECT_EQ(drawn("a\x01\n\x7f"), "a???");
  EXPECT_EQ(drawn("a\xff\xc2"), "a??") << "no UTF-8";
  EXPECT_EQ(drawn("a\xc2\x85"), "a?") << "a control character";
  EXPECT_EQ(drawn("a\xed\xa0\x80"), "a?") << "a surrogate";
  EXPECT_EQ(drawn("a\xe0\x80\xbc"), "a?") << "an overlong '<'";
  EXPECT_EQ(drawn("a\xef\xbf\xbf"), "a?") << "U+FFFF";
  EXPECT_EQ(drawn("a\xf4\x90\x80\x80"), "a?") << "beyond U+10FFFF";
}

TEST(SvgCanvas, TextIsCutBetweenCharacters) {
  const std::string greek = "\xce\xb1\xce\xb2\xce\xb3\xce\xb4\xce\xb5\xce\xb6\xce\xb7\xce\xb8";
  for (int width = 0; width <= 100; ++width) {
    const std::string text = drawn(greek, width);
    EXPECT_LE(text_width(text, 12), width);
    EXPECT_TRUE(text.empty() || text == greek ||
                (text.ends_with("..") && greek.starts_with(text.substr(0, text.size() - 2))));
    EXPECT_EQ(text.find('?'), std::string::npos);
  }
  EXPECT_EQ(drawn(greek, text_width(greek, 12)), greek);
  EXPECT_LT(drawn(std::string(100'000, 'w'), 100).size(), 20U);
}

TEST(SvgCanvas, TextStandsAtItsAnchor) {
  SvgCanvas canvas;
  canvas.text({100, 50}, "abc", 10, 90, kInk);
  canvas.text({100, 50}, "abc", 10, 90, kInk, /*bold=*/false, SvgCanvas::Anchor::kMiddle);
  canvas.text({100, 50}, "abc", 10, 90, kInk, /*bold=*/false, SvgCanvas::Anchor::kEnd);
  canvas.upward_text({100, 50}, "abc", 10, 90, kInk);
  const auto words = parse_svg(canvas.print(200, 100)).words;
  ASSERT_EQ(words.size(), 4U);
  EXPECT_EQ(words[0].box.x, 100);
  EXPECT_EQ(words[1].box.x, 100 - words[1].box.width / 2);
  EXPECT_EQ(words[2].box.right(), 100);
  EXPECT_GT(words[3].box.height, words[3].box.width);
  EXPECT_EQ(words[3].box.y, 50 - words[3].box.height / 2);
}

TEST(SvgCanvas, XmlFaultsAreFound) {
  EXPECT_EQ(xml_fault("<a b=\"1\"><c/>x &amp; y</a>\n"), "");
  for (const char* text : {"", "<a>", "<a></b>", "<a/><b/>", "<a b=\"1\" b=\"2\"/>", "<a>&b;</a>", "<a b=1/>",
                           "<a>x<</a>", "<a>\x01</a>", "<a>\xff</a>", "x<a/>", "<a b=\"&\"/>", "</a>"}) {
    EXPECT_NE(xml_fault(text), "") << text;
  }
}

TEST(SvgCanvas, GroupsHaveTitlesAndThePictureADescription) {
  SvgCanvas canvas;
  canvas.describe("a <picture>", "of \"this\" & that");
  canvas.open("a box & more");
  canvas.box({1, 2, 3, 4}, 0, "#ffffff", "none");
  canvas.close();
  const std::string svg = canvas.print(20, 20);
  EXPECT_EQ(xml_fault(svg), "");
  const auto picture = parse_svg(svg);
  EXPECT_EQ(picture.titles, (std::vector<std::string>{"a <picture>", "a box & more"}));
  EXPECT_EQ(picture.description, "of \"this\" & that");
  EXPECT_LT(svg.find("<desc>"), svg.find("<rect")) << "what describes a picture comes first";
}

TEST(SvgCanvas, ParagraphsBreakBetweenWords) {
  SvgCanvas canvas;
  const std::string text = "one two three four five six seven eight nine ten";
  const int below = canvas.paragraph({5, 20}, text, 12, 100, kInk);
  const auto picture = parse_svg(canvas.print(200, 400));
  std::string all;
  for (const auto& word : picture.words) {
    EXPECT_LE(word.box.width, 100);
    all += (all.empty() ? "" : " ") + word.text;
  }
  EXPECT_EQ(all, text);
  EXPECT_EQ(below, 20 + 16 * static_cast<int>(picture.words.size()));
  EXPECT_EQ(testing::layout_fault(picture), "");
}

}  // namespace
}  // namespace annulus::canvas_test
