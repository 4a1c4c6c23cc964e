// Tests what comes after the attempts of a job (launcher/launch/restarts.h).
#include "launcher/launch/restarts.h"

#include <gtest/gtest.h>

namespace annulus::restarts_test {
namespace {

using Words = std::vector<std::string>;

const Words kProgram = {"train", "a.toml", "--set", "run.steps=9", "--resume", "--set", "timeout=2"};

Attempt failed_after(int64_t step, int64_t checkpoint, int code = 137) {
  return {.code = code,
          .step = step,
          .resume = ResumePoint{ResumePoint::Checkpoint::kThere,
                                checkpoint,
                                "runs/a-001/checkpoints/step-00000004",
                                {"./annulus", "launch", "-n", "2", "train", "a.toml", "--resume", "runs/a-001"}}};
}

TEST(Restarts, AFailedJobContinuesFromItsCheckpoint) {
  const NextAttempt next = next_attempt({failed_after(5, 4)}, 2, kProgram);
  EXPECT_TRUE(next.again);
  EXPECT_EQ(next.program,
            (Words{"train", "a.toml", "--set", "run.steps=9", "--set", "timeout=2", "--resume", "runs/a-001"}));
  EXPECT_EQ(next.why,
            "attempt 2 of 3, after a failure in the step after step 5: continues from the checkpoint of step 4");
}

TEST(Restarts, WithoutACheckpointItBeginsAsTheFirstOneDid) {
  for (const auto state : {ResumePoint::Checkpoint::kNoneYet, ResumePoint::Checkpoint::kGone}) {
    Attempt attempt = failed_after(5, 4);
    attempt.resume->checkpoint = state;
    const NextAttempt next = next_attempt({attempt}, 1, kProgram);
    EXPECT_TRUE(next.again);
    EXPECT_EQ(next.program, kProgram);
  }
  EXPECT_EQ(next_attempt({{.code = 137}}, 1, kProgram).program, kProgram);
}

TEST(Restarts, NothingComesAfterTheEndOrARequestToStop) {
  for (const Attempt& attempt :
       {Attempt{}, Attempt{.code = 130, .stopped = true}, Attempt{.code = 141, .stopped = true}}) {
    const NextAttempt next = next_attempt({attempt}, 3, kProgram);
    EXPECT_FALSE(next.again);
    EXPECT_EQ(next.why, "");
  }
  EXPECT_EQ(next_attempt({failed_after(5, 4)}, 0, kProgram).why, "");
}

TEST(Restarts, AFaultThatWouldComeAgainEndsTheJob) {
  for (const int code : {2, 3, 4, 5, 9}) {
    const NextAttempt next = next_attempt({failed_after(5, 4, code)}, 3, kProgram);
    EXPECT_FALSE(next.again);
    EXPECT_EQ(next.why, "not started again, because this error would come again");
  }
  // A dead peer, a full disk, a rank that was killed.
  for (const int code : {1, 6, 8, 137}) EXPECT_TRUE(next_attempt({failed_after(5, 4, code)}, 3, kProgram).again);
}

TEST(Restarts, TwoFailuresInOneStepEndTheJob) {
  const NextAttempt next = next_attempt({failed_after(3, 2), failed_after(5, 4), failed_after(5, 4)}, 9, kProgram);
  EXPECT_FALSE(next.again);
  EXPECT_NE(next.why.find("two attempts failed in the step after step 5"), std::string::npos) << next.why;
  EXPECT_FALSE(next_attempt({{.code = 1}, {.code = 1}}, 9, kProgram).again);
  EXPECT_TRUE(next_attempt({failed_after(5, 4), failed_after(6, 4)}, 9, kProgram).again);
}

TEST(Restarts, AreCounted) {
  std::vector<Attempt> attempts = {failed_after(1, 0), failed_after(2, 0)};
  EXPECT_TRUE(next_attempt(attempts, 2, kProgram).again);
  attempts.push_back(failed_after(3, 0));
  EXPECT_EQ(next_attempt(attempts, 2, kProgram).why, "not started again: --restarts 2 are used up");
}

}  // namespace
}  // namespace annulus::restarts_test
