// Tests the exit code and the messages with which the launcher ends, for each way in which a job can end.
#include "launcher/launch/exit_report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cerrno>
#include <optional>
#include <string>
#include <vector>

namespace annulus::exit_report_test {
namespace {

constexpr bool kSaid = true;

RankEnd reported(int rank, int code, std::string message, bool said = false) {
  return {rank, code, std::move(message), said, false};
}
RankEnd following(int rank, int failed, int code, std::string message) {
  return {rank, code, std::move(message), false, false, failed};
}
RankEnd died(int rank) { return {rank, 0, "", false, true}; }

JobEnd job(int ranks, int mpirun_code, std::vector<RankEnd> failed = {}) {
  JobEnd end;
  end.ranks = ranks;
  end.mpirun_code = mpirun_code;
  end.failed = std::move(failed);
  end.log_dir = "logs";
  return end;
}
JobEnd stopped(JobEnd end, int signal, bool forced = false) {
  end.stop_signal = signal;
  end.forced = forced;
  return end;
}
JobEnd resumable(JobEnd end, ResumePoint::Checkpoint checkpoint = ResumePoint::Checkpoint::kThere) {
  const bool none = checkpoint == ResumePoint::Checkpoint::kNoneYet;
  end.resume = ResumePoint{checkpoint,
                           none ? 0 : 90,
                           none ? "" : "runs/x-001/checkpoints/step-00000090",
                           {"./annulus", "train", "it's x.toml", "--resume", "runs/x-001"}};
  return end;
}
JobEnd with(JobEnd end, void (*change)(JobEnd&)) {
  change(end);
  return end;
}

struct Case {
  std::string name;
  JobEnd end;
  int code;
  std::vector<std::string> messages;
};

const std::string kStopped = "stopped";
const std::string kLost = "stopped; what was not in a finished checkpoint is lost";
const std::string kCommand = "./annulus train 'it'\\''s x.toml' --resume runs/x-001";
const std::string kGoOn = "to continue from the checkpoint of step 90: " + kCommand;
const std::string kNothing = "there is no checkpoint yet: the steps that were done are lost";
const std::string kFull =
    "[output] standard output could not be written: No space left on device; free some space or "
    "write elsewhere";
std::string last(int code) { return "exit code " + std::to_string(code) + ", logs in logs"; }

std::vector<Case> cases() {
  return {
      {"success", job(4, 0), 0, {}},

      // Ranks that failed.
      {"one rank of four fails", job(4, 1, {reported(2, 3, "[data] no text")}), 3, {"rank 2: [data] no text", last(3)}},
      {"the only rank is not numbered", job(1, 1, {reported(0, 3, "[data] no text")}), 3, {"[data] no text", last(3)}},
      {"one rank has printed the error of all",
       job(4, 5, {reported(1, 5, "[job] differs", kSaid), reported(0, 5, "[job] differs", kSaid)}),
       5,
       {last(5)}},
      {"several ranks fail alike",
       job(5, 4, {reported(3, 4, "[x] y"), reported(0, 4, "[x] y"), reported(1, 4, "[x] y"), reported(4, 4, "[x] y")}),
       4,
       {"ranks 0-1, 3-4: [x] y", last(4)}},
      {"another rank fails after it",
       job(4, 6, {reported(2, 3, "[data] no text"), reported(0, 6, "[comm] rank 2 is gone")}),
       3,
       {"rank 2: [data] no text", "rank 0 failed after it", last(3)}},
      {"the same code with other messages",
       job(4, 6, {reported(2, 6, "[comm] a"), reported(0, 6, "[comm] b")}),
       6,
       {"rank 2: [comm] a", "rank 0 failed after it", last(6)}},
      {"others are heard before the rank that failed",
       job(4, 3,
           {following(1, 2, 3, "[data] on rank 2: no text"), following(0, 2, 3, "[data] on rank 2: no text"),
            reported(2, 3, "[data] no text"), died(3)}),
       3,
       {"rank 2: [data] no text", "ranks 0-1 failed after it", last(3)}},
      {"the rank that failed is ended before it reports",
       job(4, 3, {following(1, 2, 3, "[data] on rank 2: no text"), died(2)}),
       3,
       {"rank 1: [data] on rank 2: no text", last(3)}},
      {"a failure without a message", job(2, 7, {reported(1, 7, "")}), 7, {"rank 1 ended with exit code 7", last(7)}},
      {"mpirun reports no failure", job(2, 0, {reported(1, 7, "[x] y")}), 7, {"rank 1: [x] y", last(7)}},

      // Ranks that died without a report: mpirun has the exit code.
      {"killed", job(4, 128 + SIGKILL, {died(1)}), 137, {"rank 1 was ended by signal 9 (Killed)", last(137)}},
      {"one rank is killed, then mpirun kills the others",
       job(4, 137, {died(1), died(0), died(3)}),
       137,
       {"rank 1 was ended by signal 9 (Killed)", last(137)}},
      {"one rank is killed, then another fails",
       job(4, 137, {died(1), reported(0, 6, "[comm] rank 1 is gone")}),
       137,
       {"rank 1 was ended by signal 9 (Killed)", "rank 0 failed after it", last(137)}},
      {"_exit", job(2, 42, {died(0)}), 42, {"rank 0 ended with exit code 42", last(42)}},
      {"_exit(0) is a failure", job(2, 0, {died(0)}), 1, {"rank 0 ended with exit code 1", last(1)}},
      {"the last lines of a rank that the terminal does not show",
       with(job(2, 42, {died(1)}),
            [](JobEnd& e) {
              e.unseen = {{"not these"}, {"terminate called", "what(): x"}};
            }),
       42,
       {"rank 1 ended with exit code 42; its last lines:\n  terminate called\n  what(): x", last(42)}},

      {"killed for lack of memory",
       with(job(2, 137, {died(0)}), [](JobEnd& e) { e.failed[0].memory = true; }),
       137,
       {"rank 0 was ended by signal 9 (Killed); the kernel has just ended processes of its host for lack of memory",
        last(137)}},

      // A rank that stands still or a lost host, which has been said. What fails then follows from it.
      {"stuck, then ended by the launcher",
       with(resumable(job(4, 143, {died(1), reported(0, 6, "[comm] rank 1 is gone")})),
            [](JobEnd& e) {
              e.faulty = 1;
              e.forced = true;
              e.mpirun_signal = SIGTERM;
            }),
       6,
       {kGoOn, last(6)}},
      {"lost host, of which mpirun has its own code",
       with(job(4, 205, {died(2), died(3)}), [](JobEnd& e) { e.faulty = 2; }),
       6,
       {last(6)}},
      {"stuck while it stops on request",
       with(stopped(job(2, 143, {died(0)}), SIGTERM, true), [](JobEnd& e) { e.faulty = 1; }),
       143,
       {kLost, last(143)}},

      // Failures of mpirun itself.
      {"mpirun fails",
       with(job(2, 213),
            [](JobEnd& e) {
              e.any_started = false;
              e.mpirun_output = "no slots";
            }),
       213,
       {"mpirun ended with exit code 213 before any rank started; it said:\nno slots", last(213)}},
      {"mpirun fails without output", job(2, 1), 1, {"mpirun ended with exit code 1; it said:\n(nothing)", last(1)}},
      {"mpirun is killed",
       with(job(2, 137, {died(0), died(1)}), [](JobEnd& e) { e.mpirun_signal = SIGKILL; }),
       137,
       {"mpirun was ended by signal 9 (Killed)", "rank 0 was ended by signal 9 (Killed)", last(137)}},

      // Jobs that were asked to stop.
      {"stopped, and all ranks end with 0", stopped(job(4, 0), SIGINT), 0, {}},
      {"Ctrl-C, reported by the ranks",
       stopped(job(4, 130, {reported(0, 130, "")}), SIGINT),
       130,
       {kStopped, last(130)}},
      {"SIGTERM, with exit code 138 from mpirun", stopped(job(4, 138, {died(1)}), SIGTERM), 143, {kStopped, last(143)}},
      {"the output was closed", stopped(job(4, 138, {died(0)}), SIGPIPE), 141, {kStopped, last(141)}},
      {"a rank fails while the job stops",
       stopped(job(4, 4, {reported(0, 4, "[checkpoint] the disk is full")}), SIGINT),
       4,
       {"rank 0: [checkpoint] the disk is full", last(4)}},
      {"the job did not stop in time", stopped(job(4, 143, {died(0)}), SIGINT, true), 130, {kLost, last(130)}},
      {"one rank fails, and the others do not stop",
       stopped(job(4, 4, {reported(2, 4, "[x] y")}), SIGINT, true),
       130,
       {"rank 2: [x] y", kLost, last(130)}},

      // A run of `train` that has begun: the report says how to continue.
      {"success, with nothing to continue", resumable(job(4, 0)), 0, {}},
      {"a rank fails", resumable(job(4, 1, {reported(2, 6, "[x] y")})), 6, {"rank 2: [x] y", kGoOn, last(6)}},
      {"one rank has printed the failure of all, with a checkpoint",
       resumable(job(4, 5, {reported(0, 5, "[job] differs", kSaid)})),
       5,
       {kGoOn, last(5)}},
      {"a rank is killed",
       resumable(job(4, 137, {died(1)})),
       137,
       {"rank 1 was ended by signal 9 (Killed)", kGoOn, last(137)}},
      {"rank 0 is killed",
       resumable(job(4, 137, {died(0)})),
       137,
       {"rank 0 was ended by signal 9 (Killed)", kGoOn, last(137)}},
      {"before the first checkpoint",
       resumable(job(4, 137, {died(1)}), ResumePoint::Checkpoint::kNoneYet),
       137,
       {"rank 1 was ended by signal 9 (Killed)", kNothing, last(137)}},
      {"the checkpoint was removed",
       resumable(job(4, 137, {died(1)}), ResumePoint::Checkpoint::kGone),
       137,
       {"rank 1 was ended by signal 9 (Killed)",
        "the checkpoint of step 90 is not in runs/x-001/checkpoints/step-00000090 any more", last(137)}},
      {"the job did not stop in time, and can continue",
       resumable(stopped(job(4, 143, {died(0)}), SIGINT, true)),
       130,
       {kLost, kGoOn, last(130)}},
      {"stopped: rank 0 has printed how to continue",
       resumable(stopped(job(4, 130, {reported(1, 130, ""), reported(0, 130, "")}), SIGINT)),
       130,
       {kStopped, last(130)}},
      {"rank 0 has printed how to continue, but nobody reads it",
       with(resumable(stopped(job(4, 143, {reported(0, 143, "")}), SIGPIPE)),
            [](JobEnd& e) { e.output_error = EPIPE; }),
       141,
       {kStopped, kGoOn, last(141)}},
      {"a checkpoint could not be written",
       resumable(job(4, 8, {reported(0, 8, "[files] disk full")})),
       8,
       {"rank 0: [files] disk full", kGoOn, last(8)}},

      // Output of the launcher itself is lost.
      {"a full disk stops the job",
       with(stopped(job(4, 138, {died(0)}), SIGPIPE), [](JobEnd& e) { e.output_error = ENOSPC; }),
       8,
       {kStopped, kFull, last(8)}},
      {"a full disk at the very end", with(job(4, 0), [](JobEnd& e) { e.output_error = ENOSPC; }), 8, {kFull, last(8)}},
      {"the reader is gone at the very end",
       with(job(4, 0), [](JobEnd& e) { e.output_error = EPIPE; }),
       141,
       {last(141)}},
      {"lost output after a failure, which has precedence",
       with(job(2, 7, {reported(1, 7, "[x] y")}), [](JobEnd& e) { e.output_error = ENOSPC; }),
       7,
       {"rank 1: [x] y", last(7)}},

      // The launcher ends a job that hangs after a failure, although nobody has asked it to stop.
      {"ended by the launcher",
       with(job(4, 143, {reported(1, 3, "[data] x"), died(0)}),
            [](JobEnd& e) {
              e.forced = true;
              e.mpirun_signal = SIGTERM;
            }),
       3,
       {"rank 1: [data] x", last(3)}},
  };
}

TEST(ExitReport, NamesTheRankThatFailedByItself) {
  const std::string text = "[data] no text", of_others = "[data] on rank 2: no text";
  const auto first_failed = [](std::vector<RankEnd> failed) {
    return exit_report_of(job(3, 3, std::move(failed))).failed_rank;
  };
  EXPECT_EQ(first_failed({following(0, 2, 3, of_others), following(1, 2, 3, of_others), reported(2, 3, text)}), 2);
  EXPECT_EQ(first_failed({following(0, 2, 3, of_others), died(2)}), 2);
  EXPECT_EQ(first_failed({died(1), following(0, 2, 3, of_others), reported(2, 3, text)}), 1);
  EXPECT_EQ(first_failed({reported(1, 3, text), reported(0, 3, text)}), 1);
  EXPECT_EQ(first_failed({reported(1, 3, text), reported(0, 3, text), reported(2, 3, text)}), std::nullopt);
  EXPECT_EQ(first_failed({reported(1, 5, text, kSaid), reported(0, 5, text, kSaid)}), std::nullopt);
  EXPECT_EQ(first_failed({}), std::nullopt);
}

TEST(ExitReport, GivesExitCodeAndMessagesOfEachCase) {
  for (const Case& c : cases()) {
    const ExitReport report = exit_report_of(c.end);
    EXPECT_EQ(report.code, c.code) << c.name;
    EXPECT_EQ(report.messages, c.messages) << c.name;
  }
}

}  // namespace
}  // namespace annulus::exit_report_test
