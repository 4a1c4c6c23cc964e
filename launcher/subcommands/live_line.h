// Shows on a terminal what a slow subcommand is doing. Used by plan.cc and fit.cc. Not thread safe.
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

// One line on standard error that is overwritten with each text and cleared at the end. It appears only on a terminal,
// and only after 2 s.
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
