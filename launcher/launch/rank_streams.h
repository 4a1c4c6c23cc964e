// What the ranks of a launch print: read from their pipes, shown on the terminal with a prefix, kept in a log file for
// each. Rank 0's bytes pass through untouched (terminal.h). Used by supervisor.cc.
#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/launch/terminal.h"

namespace annulus {

// The file LOG_DIR/NAME of a job. What it does not take, on a full disk, is lost, and lost() says so: a job does not
// fail for its logs.
class LogFile {
 public:
  LogFile() = default;
  // Empty at first. Raises Error(kResource).
  LogFile(const std::string& log_dir, const std::string& name);
  void add(std::string_view text);
  void flush();
  // "LOG_DIR/NAME: No space left on device"; empty where everything was written.
  std::string lost() const;

 private:
  void note_failure();

  std::string path_;
  std::ofstream file_;
  int error_ = 0;
};

class RankStreams {
 public:
  // Makes the pipes SESSION_DIR/rank-R.out and .err, which ranks open (rank.h), and the files LOG_DIR/rank-R.log.
  // `terminal` outlives it. Raises Error(kResource).
  RankStreams(int ranks, const std::string& session_dir, const std::string& log_dir, Terminal& terminal);
  ~RankStreams();
  RankStreams(const RankStreams&) = delete;
  RankStreams& operator=(const RankStreams&) = delete;

  // A rank elsewhere has called back: its standard output or error comes from `fd` instead of its pipe.
  void adopt(int rank, Terminal::Stream stream, int fd);
  // Whether something is to come from a rank elsewhere, which has not ended its streams.
  bool expects_more() const;

  // Adds the descriptors to be polled.
  void watch(std::vector<pollfd>& fds) const;
  // Takes what this rank has printed so far.
  void read(int rank);
  void read_all();
  // Takes lines that have no end yet: nothing more comes.
  void finish();

  // A line of the launcher's in a rank's log.
  void note(int rank, const std::string& line);
  // The last lines of a rank's standard error, where the terminal has shown much else since; else nothing.
  std::vector<std::string> unseen(int rank) const;
  // Of the ranks' logs that are not whole (LogFile::lost), in order of ranks.
  std::vector<std::string> lost_logs() const;

 private:
  struct Source {
    int fd = -1;
    bool adopted = false;
    LineSplitter terminal;  // lines for the terminal; unused where bytes pass through
    LineSplitter log;
  };
  struct Rank {
    Source out, err;
    LogFile log;
    std::chrono::steady_clock::time_point last_live{};  // when a replaced ('\r') line was last written to the log
    std::deque<std::string> tail;                       // last lines of standard error
    int64_t shown = 0;                                  // when the terminal last showed something of it, in shown_
  };

  void take(size_t i, Source& source, Terminal::Stream stream, std::string_view bytes);
  void log_line(size_t i, Terminal::Stream stream, std::string_view line, bool replaced);

  Terminal& terminal_;
  std::vector<Rank> ranks_;
  int64_t shown_ = 0;  // pieces of ranks' output that the terminal has shown
};

}  // namespace annulus
