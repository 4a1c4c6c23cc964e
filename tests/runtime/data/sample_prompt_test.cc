// Tests of runtime/data/sample_prompt.h: which words of a text become a prompt.
// integration_tests/tokens_page_test.py runs the command that a run suggests.
#include "runtime/data/sample_prompt.h"

#include <gtest/gtest.h>

namespace annulus::sample_prompt_test {
namespace {

TEST(SamplePrompt, IsTheBeginningOfTheFirstLineWithWords) {
  EXPECT_EQ(first_words("import os\nimport sys\n"), "import os");
  EXPECT_EQ(first_words("\n\n   def f(x):\n    return x\n"), "def f(x):");
  EXPECT_EQ(first_words("\t\x7f\na\tb\n"), "a") << "control characters end a line";
  EXPECT_EQ(first_words("--help prints this\nusage of it\n"), "usage of it") << "this would be an option";
  EXPECT_EQ(first_words(""), "");
  EXPECT_EQ(first_words("\n  \n"), "");
}

TEST(SamplePrompt, EndsAtAWord) {
  EXPECT_EQ(first_words("0123456789 0123456789 0123456789x yz\n"), "0123456789 0123456789");
  EXPECT_EQ(first_words("0123456789 0123456789 0123456789\n"), "0123456789 0123456789 0123456789");
  EXPECT_EQ(first_words("0123456789 0123456789 0123456789 \n"), "0123456789 0123456789 0123456789");
  EXPECT_EQ(first_words("once upon a ti"), "once upon a") << "the last word may have been cut";
  EXPECT_EQ(first_words("word"), "");
  EXPECT_EQ(first_words(std::string(100, 'x') + "\nshort one\n"), "short one");
}

TEST(SamplePrompt, IsWholeUtf8) {
  EXPECT_EQ(first_words("l\xc3\xa4nger \xe6\x95\xb0 \xf0\x9f\x98\x80\n"),
            "l\xc3\xa4nger \xe6\x95\xb0 \xf0\x9f\x98\x80");
  EXPECT_EQ(first_words("\x95\xb0 rest of a character\nnext line\n"), "next line");
  EXPECT_EQ(first_words("cut\xe6\x95 here\n\xff byte\nnext line\n"), "next line");
}

}  // namespace
}  // namespace annulus::sample_prompt_test
