// See restarts.h.
#include "launcher/launch/restarts.h"

#include "common/error.h"
#include "common/text.h"
#include "runtime/run/run_messages.h"

namespace annulus {
namespace {

bool comes_again(int code) {
  switch (static_cast<ErrorKind>(code)) {
    case ErrorKind::kUsage:
    case ErrorKind::kInput:
    case ErrorKind::kPlan:
    case ErrorKind::kMismatch:
    case ErrorKind::kUnavailable:
      return true;
    default:
      return false;
  }
}

std::string failed_in(const Attempt& attempt) {
  return attempt.step ? "in the step after step " + with_commas(*attempt.step) : "before its first step";
}

}  // namespace

NextAttempt next_attempt(const std::vector<Attempt>& attempts, int restarts, const std::vector<std::string>& program) {
  const Attempt& last = attempts.back();
  if (restarts == 0 || last.code == 0 || last.stopped) return {};
  if (comes_again(last.code)) return {false, "not started again, because this error would come again"};
  if (attempts.size() > 1 && attempts[attempts.size() - 2].step == last.step) {
    return {false, "not started again: two attempts failed " + failed_in(last) +
                       ", so the fault is probably not one of the machine"};
  }
  const auto done = static_cast<int>(attempts.size()) - 1;
  if (done == restarts) return {false, "not started again: --restarts " + std::to_string(restarts) + " are used up"};
  NextAttempt next{true, "attempt " + std::to_string(done + 2) + " of " + std::to_string(restarts + 1) +
                             ", after a failure " + failed_in(last) + ": "};
  next.program = program;
  if (!last.resume || last.resume->checkpoint != ResumePoint::Checkpoint::kThere) {
    next.why += "begins as the first one did, because there is no checkpoint";
    return next;
  }
  // The command that continues a run ends with --resume and the run's folder.
  next.program = without_option(program, "--resume");
  next.program.insert(next.program.end(), {"--resume", last.resume->command.back()});
  next.why += "continues from the checkpoint of step " + with_commas(last.resume->step);
  return next;
}

}  // namespace annulus
