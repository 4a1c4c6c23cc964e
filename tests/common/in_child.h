// For tests: runs code in a child process, because a process cannot undo some changes, such as bindings.
#pragma once

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>

namespace annulus {

// Runs `body` in a child process. The test fails if `body` returns a text that is not empty.
inline void in_child(const std::function<std::string()>& body) {
  std::cout.flush();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::string wrong;
    try {
      wrong = body();
    } catch (const std::exception& error) {
      wrong = std::string("raised: ") + error.what();
    }
    if (!wrong.empty()) std::cerr << "child: " << wrong << std::endl;
    _exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
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
