// Tests of the parts of an Error and of its wire form, in which it is sent to other ranks and processes.
#include "common/error.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace annulus::error_test {
namespace {

TEST(Error, KeepsRoomAndMessageApart) {
  const Error error(ErrorKind::kPlan, "plan", "3 heads] over 2 ranks");
  EXPECT_STREQ(error.what(), "[plan] 3 heads] over 2 ranks");
  EXPECT_EQ(error.module(), "plan");
  EXPECT_EQ(error.message(), "3 heads] over 2 ranks");
  EXPECT_EQ(error.kind(), ErrorKind::kPlan);
  EXPECT_EQ(error.exit_code(), 4);
  const Error copy = error;  // NOLINT: the copy is tested
  EXPECT_EQ(copy.module(), "plan");
  EXPECT_EQ(copy.message(), "3 heads] over 2 ranks");
}

TEST(Error, WireFormRoundTrips) {
  const std::pair<std::string, std::string> cases[] = {{"plan", "12 query heads"},
                                                       {"a module] with 2 words", "[x] y"},
                                                       {"", ""},
                                                       {"data", "several\nlines"},
                                                       {"7", " 8 9"}};
  for (const auto& [module, message] : cases) {
    for (const ErrorKind kind : {ErrorKind::kInternal, ErrorKind::kComm, ErrorKind::kRegression}) {
      const std::optional<Error> back = Error::from_wire(Error(kind, module, message).wire());
      ASSERT_TRUE(back) << module << message;
      EXPECT_EQ(back->kind(), kind);
      EXPECT_EQ(back->module(), module);
      EXPECT_EQ(back->message(), message);
    }
  }
  EXPECT_EQ(Error(ErrorKind::kPlan, "plan", "12 query heads").wire(), "4 4 plan 12 query heads");
}

TEST(Error, TruncatedWireFormKeepsKindAndRoom) {
  const std::string whole = Error(ErrorKind::kInput, "data", "a long message").wire();
  const std::optional<Error> cut = Error::from_wire(whole.substr(0, whole.size() - 8));
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->kind(), ErrorKind::kInput);
  EXPECT_EQ(cut->module(), "data");
  EXPECT_EQ(cut->message(), "a long");
}

TEST(Error, RefusesInvalidWireForms) {
  for (const std::string text : {"",
                                 " ",
                                 "4",
                                 "4 ",
                                 "4 4",
                                 "4 4 ",
                                 "4 4 pla",
                                 "4 4 plan",
                                 "4 4 planmessage",
                                 "0 4 plan x",
                                 "11 4 plan x",
                                 "-4 4 plan x",
                                 "+4 4 plan x",
                                 "4 -1 plan x",
                                 "4 5 plan x",
                                 "4 18446744073709551615 plan x",
                                 "4 99999999999999999999 plan x",
                                 "4  4 plan x",
                                 "four 4 plan x",
                                 "4294967300 4 plan x",
                                 "[plan] x"}) {
    EXPECT_FALSE(Error::from_wire(text)) << text;
  }
  EXPECT_FALSE(Error::from_wire(std::string("4 4 pl\0n x", 11)));
}

TEST(Error, ZeroByteShortensOnlyTheShownText) {
  const Error error(ErrorKind::kInput, std::string("da\0ta", 5), "message");
  EXPECT_EQ(error.module(), "da");
  EXPECT_EQ(error.message(), "");
}

}  // namespace
}  // namespace annulus::error_test
