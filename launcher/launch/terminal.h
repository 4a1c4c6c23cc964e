// Merges the output of all ranks into one readable output. Rank 0's bytes are written unchanged, so that its progress
// line is updated live; lines of other ranks are inserted without breaking that line. Used by launcher/launch/. Thread
// safety: one thread.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

class Terminal {
 public:
  // Takes the descriptors of standard output and error, which stay open. An unfinished line is erased on a terminal
  // that supports escape sequences (common/terminal.h).
  Terminal(int out, int err);

  enum Stream { kOut = 0, kErr = 1 };

  void write_raw(Stream stream, std::string_view bytes);
  // Writes `text` and a line break. On a terminal the line replaces the live line, which reappears with its next
  // update.
  void write_line(Stream stream, std::string_view text);
  // The errno because of which standard output can no longer be written: EPIPE if its reader has gone (a closed pipe or
  // terminal), ENOSPC on a full disk; 0 if it can be written.
  int error() const { return error_[kOut]; }

 private:
  void put(Stream stream, std::string_view bytes);

  int fd_[2];
  bool tty_[2];
  bool erases_[2];
  bool shared_;                        // both streams go to the same terminal or file
  bool mid_line_[2] = {false, false};  // the last byte written was not a line break
  int error_[2] = {0, 0};
};

// Splits a stream into lines, to give them a prefix or to write them to a log file. A '\r' ends a line that the next
// one replaces on a terminal.
class LineSplitter {
 public:
  // Calls sink(line, replaced) for each complete line; `replaced` is true for a line that ended with '\r'.
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
  // Calls sink for the rest, which has no line break.
  template <typename Sink>
  void finish(Sink&& sink) {
    if (!line_.empty()) sink(std::string_view(line_), false);
    line_.clear();
  }

 private:
  static constexpr size_t kLongest = 16384;
  std::string line_;
  bool skip_empty_ = false;  // so that "\r\n" is one line break
};

}  // namespace annulus
