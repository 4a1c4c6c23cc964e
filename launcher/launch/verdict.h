// How a job ended: from what each rank, mpirun and the user did to an exit code and what is said. No process, file or
// clock is touched by judge(), so that a table of cases tests it (tests/launcher/verdict_test.cc). Used by
// supervisor.cc, and by `train` for a run that nothing watches.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

// The end of one rank that failed.
struct RankEnd {
  int rank = 0;
  int code = 0;         // 0 where it ended abruptly
  std::string message;  // what it reported; may be empty
  bool said = false;    // one rank has printed the message for all
  bool abrupt = false;  // ended without a word: a signal, or _exit
};

// From where a run of `train` can go on.
struct ResumePoint {
  enum class Checkpoint { kNoneYet, kThere, kGone };
  Checkpoint checkpoint = Checkpoint::kNoneYet;  // on the disk, when the job has ended
  int64_t step = 0;                              // of it
  std::string folder;                            // of it
  std::vector<std::string> command;              // the words that go on from it
};

// From the checkpoint of `step` in `folder`, or the newest one beside it that is on the disk; an empty folder: there is
// none yet.
ResumePoint resume_point(int64_t step, const std::string& folder, const std::vector<std::string>& command);

// What to tell the user: "to go on from the checkpoint of step 40: ./annulus train ...", or why that cannot be.
std::string resume_text(const ResumePoint& resume);

struct JobEnd {
  int ranks = 1;
  std::vector<RankEnd> failed;  // in order of time
  // By rank: the last lines of its standard error, where the terminal does not show them any more.
  std::vector<std::vector<std::string>> unseen;

  int mpirun_code = 0;      // its exit code; 128 + signal where a signal ended it
  int mpirun_signal = 0;    // 0: it exited
  std::string mpirun_said;  // what it printed itself
  bool any_started = true;  // at least one rank came up

  int stop_signal = 0;  // that asked the job to stop (SIGINT: Ctrl-C, SIGPIPE: the output was closed); 0: nobody did
  bool forced = false;  // the ranks were ended by the launcher

  int output_error = 0;  // errno of the launcher's standard output, EPIPE: its reader has gone; 0: all was written

  std::optional<ResumePoint> resume;  // of a run of `train` that has begun
  std::string log_dir;
};

struct Verdict {
  int code = 0;                    // as run_launch returns it (launch.h)
  std::vector<std::string> words;  // line by line; empty where there is nothing to say
};

Verdict judge(const JobEnd& end);

}  // namespace annulus
