// A test's code in a process of its own: for what a process cannot undo, such as bindings.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <iostream>
#include <string>

namespace annulus {

// Runs `body` in a child; it reports by returning an empty text or what is wrong.
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

}  // namespace annulus
