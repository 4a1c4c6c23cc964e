// The error of a rank that did not fail itself, but ends because another rank failed. together() (agreement.h) raises
// it, and launcher/program.cc reports it to the launcher, which then knows whose records to show last.
#pragma once

#include "common/error.h"

namespace annulus {

class FollowingError final : public Error {
 public:
  // `failed` is the lowest rank that failed, numbered as in the job.
  FollowingError(const Error& error, int failed) : Error(error), failed_(failed) {}
  int failed() const { return failed_; }

 private:
  int failed_;
};

}  // namespace annulus
