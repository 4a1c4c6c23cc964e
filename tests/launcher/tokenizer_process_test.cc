// Tests launcher/tokens/tokenizer_process.h with scripts in place of ./annulus; tests/python/tokenizer/process_test.py
// tests it with the real tokenizers, and sample_tokenizer_test.cc the answers that it refuses.
#include "launcher/tokens/tokenizer_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>

#include "comm/bootstrap/bootstrap.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "tests/launcher/tokenizer_stand_in.h"

namespace annulus::tokenizer_process_test {
namespace {

using Ids = std::vector<int64_t>;

class TokenizerProcessTest : public TokenizerStandIn {
 protected:
  // Makes a script that writes its process id to the file "pid", one line for each start, and goes on with `body`.
  void counted_script(const std::string& body) {
    script("cd " + folder_ + "\necho $$ >>pid\n" + body);
    std::ofstream(folder_ + "/pid", std::ios::trunc);
  }
  // Returns whether this process has no child any more, not even one that has ended.
  static bool childless() { return waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD; }

  static void expect_refused(TokenizerProcess& process, ErrorKind kind, bool reported, const std::string& says) {
    try {
      process.encode("text", false);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind);
      EXPECT_EQ(dynamic_cast<const ReportedError*>(&error) != nullptr, reported);
      EXPECT_NE(error.message().find(says), std::string_view::npos) << error.message();
    }
  }
};

TEST_F(TokenizerProcessTest, OneProcessEncodesManyTexts) {
  counted_script(R"(while read -r what size; do
    sum=$(head -c "$size" | od -An -v -tu1 | awk '{ for (i = 1; i <= NF; i++) s += $i } END { print s + 0 }')
    [[ $what == beginning ]] && echo "[7,$size,$sum]" || echo "[$size, $sum]"
  done)");
  TokenizerProcess process("t");
  for (int i = 0; i < 25; ++i) {
    const std::string text = std::string(i, '\n') + std::string("\0bare 3\n\xff", 9);
    int64_t sum = 0;
    for (const unsigned char byte : text) sum += byte;
    const auto size = static_cast<int64_t>(text.size());
    ASSERT_EQ(process.encode(text, false), (Ids{size, sum}));
    ASSERT_EQ(process.encode(text, true), (Ids{7, size, sum}));
  }
  EXPECT_EQ(process.encode("", false), (Ids{0, 0}));
  const std::string pids = content("pid");
  EXPECT_EQ(std::count(pids.begin(), pids.end(), '\n'), 1);
}

TEST_F(TokenizerProcessTest, SendsAndReceivesAtTheSameTime) {
  // It writes its answer, more than a pipe or socket holds, before it reads the text.
  script(R"(for call in 1 2; do
    read -r what size
    printf '['; printf '1234567,%.0s' {1..300000}; printf '0]\n'
    head -c "$size" >/dev/null
  done)");
  TokenizerProcess process("t");
  for (int call = 0; call < 2; ++call) {
    const Ids ids = process.encode(std::string(5'000'000, 'x'), false);
    EXPECT_EQ(ids.size(), 300'001);
    EXPECT_EQ(ids.front(), 1234567);
    EXPECT_EQ(ids.back(), 0);
  }
}

TEST_F(TokenizerProcessTest, EndsTheProcessWhateverItDoes) {
  counted_script("trap '' INT TERM HUP; echo '[1]'; exec tail --pid=$PPID -f /dev/null");
  {
    TokenizerProcess process("t");
    EXPECT_EQ(process.encode("", false), Ids{1});
    EXPECT_FALSE(childless());
  }
  EXPECT_TRUE(childless());
  EXPECT_EQ(kill(std::stoi(content("pid")), 0), -1);
  { TokenizerProcess process("t"); }  // it has not even begun
  EXPECT_TRUE(childless());
}

TEST_F(TokenizerProcessTest, ReportsAnEndBetweenRequestsAndFromThenOn) {
  counted_script("read -r; echo '[1]'; kill -9 $$");
  TokenizerProcess killed("t");
  EXPECT_EQ(killed.encode("", false), Ids{1});
  for (int call = 0; call < 2; ++call) expect_refused(killed, ErrorKind::kResource, false, "ended by signal 9");
  EXPECT_TRUE(childless());

  counted_script("read -r; echo '[1]'; exit 8");
  TokenizerProcess exits("t");
  EXPECT_EQ(exits.encode("", false), Ids{1});
  for (int call = 0; call < 2; ++call) expect_refused(exits, ErrorKind::kResource, true, "failed");
  EXPECT_TRUE(childless());
  EXPECT_EQ(content("pid").find('\n'), content("pid").size() - 1) << "it was started again";
}

TEST_F(TokenizerProcessTest, AnswerWithoutIdsEndsTheProcess) {
  script("while read -r; do echo ids; done");
  TokenizerProcess process("t");
  for (int call = 0; call < 2; ++call) expect_refused(process, ErrorKind::kInternal, false, "wrote no ids: ids");
  EXPECT_TRUE(childless());
}

TEST_F(TokenizerProcessTest, RunsToTheEndAndReportsFailures) {
  counted_script("echo 'a line is no answer'; cat >input; echo done >output");
  run_tokenizer({"table"}, "makes tables");
  EXPECT_EQ(content("output"), "done\n");
  counted_script("exit 3");
  EXPECT_THROW(run_tokenizer({"table"}, "makes tables"), ReportedError);
  EXPECT_TRUE(childless());
}

// Ends this process, which watches for signals, with 0 if `holds`.
[[noreturn]] void exit_if(const std::function<bool()>& holds) {
  install_interrupt_handlers();
  try {
    std::_Exit(holds() ? 0 : 1);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(2);
  }
}

bool is_interrupted() {
  TokenizerProcess process("t");
  for (int call = 0; call < 2; ++call) {
    if (!process.encode("text", false).empty() || !interrupted()) return false;
  }
  return waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD;
}

TEST_F(TokenizerProcessTest, InterruptionEndsTheProcessAndTheWait) {
  script("kill -INT $PPID; exec tail --pid=$PPID -f /dev/null");
  EXPECT_EXIT(exit_if(is_interrupted), ::testing::ExitedWithCode(0), "");
}

TEST_F(TokenizerProcessTest, ProcessThatCtrlCEndsFirstIsNoError) {
  // The caller gets the signal only after it has seen the end of this process, which exists until then.
  script(
      "caller=$PPID; me=$$; (while kill -0 $me; do :; done; kill -INT $caller) </dev/null &>/dev/null & kill -INT $$");
  EXPECT_EXIT(exit_if(is_interrupted), ::testing::ExitedWithCode(0), "");
}

TEST_F(TokenizerProcessTest, UnreadRequestIsNoInterruption) {
  script("exit 3");
  const auto refused = [] {
    TokenizerProcess process("t");
    try {
      process.encode(std::string(5'000'000, 'x'), false);
    } catch (const ReportedError& error) {
      return error.kind() == ErrorKind::kInput && !interrupted();
    }
    return false;
  };
  EXPECT_EXIT(exit_if(refused), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace annulus::tokenizer_process_test
