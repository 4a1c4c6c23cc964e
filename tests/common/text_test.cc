// Tests of common/text.h: how numbers, strings, words of commands and lists are written as text.
#include "common/text.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

namespace annulus::text_test {
namespace {

// Existing configurations and checkpoints contain these forms.
TEST(Text, ExactNumbersKeepTheirForm) {
  EXPECT_EQ(exact(0.1), "0.1");
  EXPECT_EQ(exact(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(exact(10000), "10000");
  EXPECT_EQ(exact(500000), "5e+05");
  EXPECT_EQ(exact(1e-5), "1e-05");
  EXPECT_EQ(exact(-0.0), "-0");
  EXPECT_EQ(exact(std::numeric_limits<double>::max()), "1.7976931348623157e+308");
  EXPECT_EQ(exact(std::numeric_limits<double>::denorm_min()), "5e-324");
  EXPECT_EQ(exact(-std::numeric_limits<double>::infinity()), "-inf");
  EXPECT_EQ(exact(std::numeric_limits<double>::quiet_NaN()), "nan");
}

RC_GTEST_PROP(Text, ExactNumbersReadBackAsTheSameBits, (uint64_t bits)) {
  const double value = std::bit_cast<double>(bits);
  RC_PRE(std::isfinite(value));
  RC_ASSERT(std::bit_cast<uint64_t>(std::strtod(exact(value).c_str(), nullptr)) == bits);
}

TEST(Text, RoundsNumbers) {
  EXPECT_EQ(rounded(3.14159, 2), "3.14");
  EXPECT_EQ(significant(3.14159, 3), "3.14");
  EXPECT_EQ(significant(1e39, 3), "1e+39");
  EXPECT_EQ(scientific(3.14159e-7, 1), "3.1e-07");
}

// The NaN of an operation that is invalid has a sign on x86 and none on ARM.
TEST(Text, NansHaveNoSign) {
  const double negative = std::copysign(std::numeric_limits<double>::quiet_NaN(), -1.0);
  ASSERT_TRUE(std::signbit(negative));
  for (const std::string& text :
       {exact(negative), rounded(negative, 2), significant(negative, 3), scientific(negative, 1)}) {
    EXPECT_EQ(text, "nan");
  }
  EXPECT_EQ(rounded(-std::numeric_limits<double>::infinity(), 2), "-inf");
}

TEST(Text, FormatsCountsAndBytes) {
  EXPECT_EQ(counted(0, "head"), "0 heads");
  EXPECT_EQ(counted(1, "head"), "1 head");
  EXPECT_EQ(counted(2, "query head"), "2 query heads");
  EXPECT_EQ(counted(2, "NVSwitch"), "2 NVSwitches");
  EXPECT_EQ(counted(2, "process"), "2 processes");
  EXPECT_EQ(counted(2, "query"), "2 queries");
  EXPECT_EQ(counted(2, "key"), "2 keys");
  EXPECT_EQ(with_commas(1, "token"), "1 token");
  EXPECT_EQ(with_commas(1048576, "token"), "1,048,576 tokens");
  EXPECT_EQ(with_commas(0, "entry"), "0 entries");
  EXPECT_EQ(bytes_text(0), "0.0 MB");
  EXPECT_EQ(bytes_text(469762048), "469.8 MB");
  EXPECT_EQ(bytes_text(1e9), "1.0 GB");
  EXPECT_EQ(bytes_text(20.6e15), "20.6 PB");
  EXPECT_EQ(bytes_text(1e30), "1000000000000.0 EB");
}

TEST(Text, ParsesByteSizes) {
  EXPECT_EQ(bytes_of_text("1"), 1);
  EXPECT_EQ(bytes_of_text("141GB"), 141'000'000'000);
  EXPECT_EQ(bytes_of_text("5 gb"), 5'000'000'000);
  EXPECT_EQ(bytes_of_text("1.5kB"), 1500);
  EXPECT_EQ(bytes_of_text("16MiB"), 16 << 20);
  EXPECT_EQ(bytes_of_text("12B"), 12);
  EXPECT_EQ(bytes_of_text("1e6"), 1'000'000);
  EXPECT_EQ(bytes_of_text("8EB"), 8'000'000'000'000'000'000);
  for (const char* text : {"", "GB", "0", "-1", "5XB", "5G", "5iB", "5 GBs", "10EB", "inf", "nan", "0.5B"}) {
    EXPECT_EQ(bytes_of_text(text), std::nullopt) << text;
  }
}

TEST(Text, QuotesTomlStrings) {
  EXPECT_EQ(toml_string(""), "\"\"");
  EXPECT_EQ(toml_string("a \"b\" \\ c"), "\"a \\\"b\\\" \\\\ c\"");
  EXPECT_EQ(toml_string(std::string("\0\n\x1f\x7f", 4)), "\"\\u0000\\u000A\\u001F\\u007F\"");
  EXPECT_EQ(toml_string("Größe"), "\"Größe\"");
}

TEST(Text, FormatsLists) {
  EXPECT_EQ(list_text(std::vector<int64_t>{}), "[]");
  EXPECT_EQ(list_text(std::vector<int64_t>{7}), "[7]");
  EXPECT_EQ(list_text(std::vector<int64_t>{2, 3, -1}), "[2, 3, -1]");
  EXPECT_EQ(list_text(std::vector<std::string>{"", "a"}, toml_string), "[\"\", \"a\"]");
}

TEST(Text, JoinsRunsOfNumbers) {
  EXPECT_EQ(ranges_text(std::vector<int>{0, 1, 2, 5}), "0-2, 5");
  EXPECT_EQ(ranges_text(std::vector<int64_t>{3, 5, 6}), "3, 5-6");
  EXPECT_EQ(ranges_text(std::vector<int>{}), "");
}

TEST(Text, GroupsDigitsWithCommas) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-123), "-123");
  EXPECT_EQ(with_commas(-123456), "-123,456");
  EXPECT_EQ(with_commas(1234567890), "1,234,567,890");
}

TEST(Text, JoinsAndSplitsLists) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(join({}, ", "), "");
  EXPECT_EQ(join({"a", "", "b"}, ", "), "a, , b");
  EXPECT_EQ(join({"", "a"}, ","), ",a");
  EXPECT_EQ(split("a,,b", ','), (Words{"a", "", "b"}));
  EXPECT_EQ(split("a,", ','), (Words{"a", ""}));
  EXPECT_EQ(split("", ','), Words{""});
}

RC_GTEST_PROP(Text, AnyWordsRoundTripOnOneLine, (const std::vector<std::string>& words)) {
  const std::string line = words_to_line(words);
  RC_ASSERT(line.find_first_of("\r\n") == std::string::npos);
  RC_ASSERT(words_of_line(line) == words);
}

TEST(Text, EscapesWordsOnOneLine) {
  const std::vector<std::string> words = {"", "a b", "\\s", "it's\n\\", "\t"};
  EXPECT_EQ(words_to_line(words), " a\\sb \\\\s it's\\n\\\\ \t ");
  EXPECT_EQ(words_of_line(words_to_line(words)), words);
}

TEST(Text, PrintableReplacesOtherBytesAndShortens) {
  EXPECT_EQ(printable("mlx5_0"), "mlx5_0");
  EXPECT_EQ(printable("\x1b[31m\xff\n"), "?[31m??");
  EXPECT_EQ(printable("abcdef", 6), "abcdef");
  EXPECT_EQ(printable("abcdefg", 6), "abcd..");
}

TEST(Text, FormatsRoundedAndTomlNumbers) {
  EXPECT_EQ(rounded(3.14159, 2), "3.14");
  EXPECT_EQ(rounded(2, 0), "2");
  EXPECT_EQ(rounded(-1e308, 1).size(), 312u);
  EXPECT_EQ(toml_number(1), "1.0");
  EXPECT_EQ(toml_number(0.1), "0.1");
  EXPECT_EQ(toml_number(1e-5), "1e-05");
}

}  // namespace
}  // namespace annulus::text_test
