// Tests what sampling needs of launcher/tokens/tokenizer_process.h with scripts in place of ./annulus;
// tests/python/tokenizer tests the real tokenizer.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "comm/bootstrap/bootstrap.h"
#include "common/error.h"
#include "launcher/tokens/tokenizer_process.h"
#include "tests/launcher/tokenizer_stand_in.h"

namespace annulus::sample_tokenizer_test {
namespace {

std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text) {
  return TokenizerProcess(tokenizer).encode(text, /*beginning=*/true);
}

class EncodePrompt : public TokenizerStandIn {
 protected:
  ErrorKind refusal() {
    try {
      encode_prompt("t", "text");
    } catch (const Error& error) {
      reported_ = dynamic_cast<const ReportedError*>(&error) != nullptr;
      return error.kind();
    }
    ADD_FAILURE() << "not refused";
    return ErrorKind::kUsage;
  }

  bool reported_ = false;
};

TEST_F(EncodePrompt, PassesTextAndReturnsIds) {
  script("cd " + folder_ + R"(; printf '%s\n' "$@" >words; read -r header; echo "$header" >header
    head -c "${header#beginning }" >text; echo '[5, 0, 70000]')");
  const std::string text = std::string("a\0b\n\xff", 5) + std::string(3'000'000, 'x');
  EXPECT_EQ(encode_prompt("some folder", text), (std::vector<int64_t>{5, 0, 70000}));
  EXPECT_EQ(content("words"), "tokenizer\nencode\n--tokenizer=some folder\n");
  EXPECT_EQ(content("header"), "beginning 3000005\n");
  EXPECT_EQ(content("text"), text);
}

TEST_F(EncodePrompt, SignalsEndTheChildAlthoughThisProcessBlocksThem) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  script("kill -TERM $$; echo '[1]'");
  EXPECT_EQ(refusal(), ErrorKind::kResource);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

TEST_F(EncodePrompt, AcceptsEmptyListOfIds) {
  script("echo '[]'");
  EXPECT_EQ(encode_prompt("t", ""), std::vector<int64_t>());
}

TEST_F(EncodePrompt, ToleratesUnreadText) {
  script("echo '[1]'");
  EXPECT_EQ(encode_prompt("t", std::string(3'000'000, 'x')), std::vector<int64_t>{1});
}

TEST_F(EncodePrompt, DoesNotRepeatErrorsThatTheProcessPrinted) {
  script("exit 3");
  EXPECT_EQ(refusal(), ErrorKind::kInput);
  EXPECT_TRUE(reported_);
  script("exit 77");
  EXPECT_EQ(refusal(), ErrorKind::kInternal);
}

TEST_F(EncodePrompt, RefusesSignalsAndMalformedAnswers) {
  script("kill -9 $$");
  EXPECT_EQ(refusal(), ErrorKind::kResource);
  for (const char* answer : {"", "ids", "{}", "[1", "[1, -2]", "[\"1\"]", "[1.5]"}) {
    script(std::string("echo '") + answer + "'");
    EXPECT_EQ(refusal(), ErrorKind::kInternal) << answer;
    EXPECT_FALSE(reported_);
  }
  unsetenv("ANNULUS_SCRIPT");
  EXPECT_EQ(refusal(), ErrorKind::kUnavailable);
}

TEST_F(EncodePrompt, ReturnsThePathOfTheWrittenTable) {
  script("printf '%s' \"${4#--output=}\" > '" + folder_ + "/output'; printf table > \"${4#--output=}\"");
  const std::string path = make_token_table("t");
  EXPECT_EQ(content("output"), path);
  std::ifstream made(path, std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(made), {}), "table");
  std::remove(path.c_str());
}

TEST_F(EncodePrompt, FailureLeavesNoTable) {
  script("printf '%s' \"${4#--output=}\" > '" + folder_ + "/output'; exit 3");
  EXPECT_THROW(make_token_table("t"), ReportedError);
  EXPECT_FALSE(std::ifstream(content("output")).good());
}

}  // namespace
}  // namespace annulus::sample_tokenizer_test
