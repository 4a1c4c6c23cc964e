// What a verb is doing, said on a terminal while it takes its time. Used by verbs that plan: verb_plan.cc,
// plan_memory.cc. Not thread-safe.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "common/terminal.h"

namespace annulus {

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// What is being done, on a terminal, once it has taken a while; one line that is written over and wiped away at last.
class LiveLine {
 public:
  ~LiveLine() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
  }
  void say(const std::string& text) {
    const double now = seconds_since(begin_);
    if (!live_ || now < 2 || (shown_ && now - said_ < 0.1)) return;
    std::fprintf(stderr, "\r%s\x1b[K", text.c_str());
    std::fflush(stderr);
    shown_ = true;
    said_ = now;
  }

 private:
  const bool live_ = takes_escapes(STDERR_FILENO);
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double said_ = 0;
  bool shown_ = false;
};

}  // namespace annulus
