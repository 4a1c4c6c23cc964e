// For tests: runs code in a child process, because a process cannot undo some changes, such as bindings.
#pragma once

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <exception>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>

namespace annulus {

// What the body of in_child() throws if the rest of it can say nothing on this machine: the test counts as skipped.
struct SkipTheTest {
  std::string reason;
};

// Runs `body` in a child process. The test fails if `body` returns a text that is not empty, and is skipped, with the
// reason, if it throws SkipTheTest.
inline void in_child(const std::function<std::string()>& body) {
  constexpr int kSkipped = 77;
  std::cout.flush();
  int said[2];
  ASSERT_EQ(pipe(said), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::string wrong, reason;
    try {
      wrong = body();
    } catch (const SkipTheTest& skip) {
      reason = skip.reason;
    } catch (const std::exception& error) {
      wrong = std::string("raised: ") + error.what();
    }
    if (!wrong.empty()) std::cerr << "child: " << wrong << std::endl;
    if (!reason.empty() && write(said[1], reason.data(), reason.size()) < 0) _exit(1);
    _exit(!wrong.empty() ? 1 : reason.empty() ? 0 : kSkipped);
  }
  close(said[1]);
  std::string reason;
  std::array<char, 4096> part{};
  for (ssize_t n = 0; (n = read(said[0], part.data(), part.size())) > 0;)
    reason.append(part.data(), static_cast<size_t>(n));
  close(said[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped) GTEST_SKIP() << reason;
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// For a child of a test that root runs: from here on the permissions of files apply to it as to other users.
inline void give_up_file_powers() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  if (syscall(SYS_capget, &header, data) != 0) throw std::runtime_error("capget");
  data[0].effective &= ~((1U << CAP_DAC_OVERRIDE) | (1U << CAP_DAC_READ_SEARCH));
  if (syscall(SYS_capset, &header, data) != 0) throw std::runtime_error("capset");
}

}  // namespace annulus
