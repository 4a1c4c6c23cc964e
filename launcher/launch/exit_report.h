// Computes how a job ended: the exit code and the messages that follow from what each rank, mpirun and the user did.
// exit_report_of() uses no process, file or clock, so that it is tested with a table of cases
// (tests/launcher/exit_report_test.cc). Used by supervisor.cc, and by `train` for a run without a launcher.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

// The end of one rank that failed. All ranks are numbered as in the job.
struct RankEnd {
  int rank = 0;
  int code = 0;         // its exit code; 0 if it ended abruptly
  std::string message;  // the error that it reported; may be empty
  bool said = false;    // one rank has printed the message for all
  bool abrupt = false;  // it ended without a report: by a signal or _exit
  int follows = -1;     // the rank because of whose failure it ended; -1: it failed itself
  bool memory = false;  // the kernel had just ended processes of its host for lack of memory
};

// The checkpoint from which a run of `train` can be continued.
struct ResumePoint {
  enum class Checkpoint { kNoneYet, kThere, kGone };
  Checkpoint checkpoint = Checkpoint::kNoneYet;  // whether it is on disk after the job has ended
  int64_t step = 0;                              // the step of the checkpoint
  std::string folder;                            // the folder of the checkpoint
  std::vector<std::string> command;              // the words of the command that continues the run
};

// The checkpoint of `step` in `folder`, or the newest one beside it that is on disk. An empty folder means that there
// is none yet.
ResumePoint resume_point(int64_t step, const std::string& folder, const std::vector<std::string>& command);

// The message for the user: "to continue from the checkpoint of step 40: ./annulus train ...", or why that is not
// possible.
std::string resume_text(const ResumePoint& resume);

struct JobEnd {
  int ranks = 1;
  std::vector<RankEnd> failed;  // in the order of time
  // By rank: the last lines of its standard error if the terminal may no longer show them (RankStreams::unseen).
  std::vector<std::vector<std::string>> unseen;

  int mpirun_code = 0;        // mpirun's exit code; 128 + signal if a signal ended it
  int mpirun_signal = 0;      // the signal that ended mpirun; 0: it exited
  std::string mpirun_output;  // what mpirun itself printed
  bool any_started = true;    // whether at least one rank started

  int stop_signal = 0;  // the signal that asked the job to stop (SIGINT: Ctrl-C; SIGPIPE: closed output); 0: none
  bool forced = false;  // whether the launcher terminated the ranks

  // The rank that stands still, or is on a host that is lost (watchers.h), which has been said. All failures follow it.
  std::optional<int> faulty;

  int output_error = 0;  // errno of the launcher's standard output (EPIPE: its reader has gone); 0: all was written

  bool quiet = false;  // whether --log-level hides the ranks' records of level info

  std::optional<ResumePoint> resume;  // for a run of `train` that has begun
  std::string log_dir;
};

struct ExitReport {
  int code = 0;  // the exit code of run_launch (launch.h)
  // The rank that failed first by itself, or the faulty one. None if no rank failed, if all failed in the same way, or
  // if they were asked to stop.
  std::optional<int> failed_rank;
  bool failed = false;                // whether a rank failed that had not been asked to stop
  std::vector<std::string> messages;  // to print; may have several lines each
};

ExitReport exit_report_of(const JobEnd& end);

// Why a job is asked to stop: "Ctrl-C", "Terminated", "the output was closed". `output_error` is as in JobEnd.
std::string stop_reason(int signal, int output_error);

}  // namespace annulus
