// Terminal: one readable output out of many ranks'. Rank 0's bytes pass through untouched, so that its progress line
// stays live; other lines are put between without tearing it. Used by launch.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

class Terminal {
 public:
  // Descriptors of standard output and error. A line that is not at its end can be erased on a terminal that takes
  // escapes (common/terminal.h).
  Terminal(int out, int err);

  enum Stream { kOut = 0, kErr = 1 };

  void write_raw(Stream stream, std::string_view bytes);
  // A whole line, `text` without its end. On a terminal it replaces the live line, which comes back with its next
  // update.
  void write_line(Stream stream, std::string_view text);
  // Why standard output takes nothing more: EPIPE where its reader has gone (a closed pipe, a terminal that was hung
  // up), ENOSPC on a full disk; 0: it does.
  int error() const { return error_[kOut]; }

 private:
  void put(Stream stream, std::string_view bytes);

  int fd_[2];
  bool tty_[2];
  bool erases_[2];
  bool shared_;                        // both streams end up in the same place
  bool mid_line_[2] = {false, false};  // the last byte written was no line end
  int error_[2] = {0, 0};
};

// Cuts a stream into lines for a prefix or a log file. A '\r' ends a line that is to be replaced.
class LineSplitter {
 public:
  // Calls sink(line, replaced) for each whole line; `replaced` for one that ended in '\r'.
  template <typename Sink>
  void feed(std::string_view bytes, Sink&& sink) {
    for (const char c : bytes) {
      if (c == '\n') {
        if (!(skip_empty_ && line_.empty())) sink(std::string_view(line_), false);
        line_.clear();
        skip_empty_ = false;
      } else if (c == '\r') {
        if (!line_.empty()) sink(std::string_view(line_), true);
        line_.clear();
        skip_empty_ = true;
      } else {
        line_ += c;
        if (line_.size() >= kLongest) {
          sink(std::string_view(line_), false);
          line_.clear();
        }
      }
    }
  }
  // What is left without a line end.
  template <typename Sink>
  void finish(Sink&& sink) {
    if (!line_.empty()) sink(std::string_view(line_), false);
    line_.clear();
  }

 private:
  static constexpr size_t kLongest = 16384;
  std::string line_;
  bool skip_empty_ = false;  // "\r\n" is one line end
};

}  // namespace annulus
