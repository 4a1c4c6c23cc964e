// Reads what the ranks of a launch print, shows it on the terminal with a prefix, and keeps a log file for each rank.
// Rank 0's output is shown unchanged (terminal.h). Used by supervisor.cc. Thread safety: one thread.
#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launcher/launch/terminal.h"

namespace annulus {

// The file LOG_DIR/NAME of a job. Text that cannot be written, for example on a full disk, is lost, and lost() reports
// it; a job does not fail because of its logs.
class LogFile {
 public:
  LogFile() = default;
  // Makes the file, empty. Throws Error(kResource).
  LogFile(const std::string& log_dir, const std::string& name);
  void add(std::string_view text);
  void flush();
  // "LOG_DIR/NAME: No space left on device", or "" if everything was written.
  std::string lost() const;

 private:
  void note_failure();

  std::string path_;
  std::ofstream file_;
  int error_ = 0;
};

class RankStreams {
 public:
  // Makes the files LOG_DIR/rank-R.log. `terminal` must outlive this object. Throws Error(kResource).
  RankStreams(int ranks, const std::string& log_dir, Terminal& terminal);
  ~RankStreams();
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;

  // Reads the standard output or error of a rank from `fd`, which this object then owns.
  void adopt(int rank, Terminal::Stream stream, int fd);
  // Whether a stream of a rank is still open.
  bool expects_more() const;

  // Adds the descriptors to poll.
  void watch(std::vector<pollfd>& fds) const;
  // Reads what this rank, or every rank, has printed so far.
  void read(int rank);
  void read_all();
  // Writes lines without a line break at the end. Call it when nothing more will come.
  void finish();

  // Shows a record of a rank, which may have several lines, and writes it to the rank's file. With `bare`, the terminal
  // shows it without the rank's prefix.
  void say(int rank, const std::string& text, bool bare);
  // Sets a function that is called with each line that a rank prints to standard error by itself. With `instead`, such
  // a line is written to the rank's file only, and the function shows it.
  void on_error_line(bool instead, std::function<void(int rank, std::string_view line)> told) {
    hidden_ = instead;
    told_ = std::move(told);
  }

  // Sets a function that is called when a rank's output has arrived, before its lines are taken: what the rank sent
  // before it printed them has arrived as well.
  void on_arrival(std::function<void(int rank)> call) { arrived_ = std::move(call); }

  // Adds a line to a rank's log file without showing it.
  void note(int rank, const std::string& line);
  // The last lines of a rank's standard error if the terminal has shown much other output since; otherwise nothing.
  std::vector<std::string> unseen(int rank) const;
  // LogFile::lost of the ranks' logs that are incomplete, in the order of ranks.
  std::vector<std::string> lost_logs() const;

 private:
  struct Source {
    int fd = -1;
    LineSplitter lines;
  };
  struct Rank {
    Source out, err;
    LogFile log;
    std::chrono::steady_clock::time_point last_live{};  // when a replaced ('\r') line was last written to the log
    std::deque<std::string> tail;                       // the last lines of standard error
    int64_t shown = 0;                                  // the value of shown_ when its output was last shown
  };

  void take(size_t i, Source& source, Terminal::Stream stream, std::string_view bytes);
  bool is_hidden(Terminal::Stream stream) const { return stream == Terminal::kErr && hidden_; }
  void take_line(size_t i, Terminal::Stream stream, std::string_view line, bool replaced);
  void keep_error_line(size_t i, std::string_view line);

  Terminal& terminal_;
  std::vector<Rank> ranks_;
  std::function<void(int, std::string_view)> told_;
  std::function<void(int)> arrived_;
  bool hidden_ = false;  // whether the terminal shows what told_ is called with in another way
  int64_t shown_ = 0;    // the number of pieces of output that the terminal has shown
};

}  // namespace annulus
