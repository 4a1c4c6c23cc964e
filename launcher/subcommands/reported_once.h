// ReportedOnce: calls of a tokenizer's process, which prints its own errors, so that nothing says them a second time.
// Used by the subcommands sample and evaluate.
#pragma once

#include "comm/bootstrap/bootstrap.h"
#include "common/error.h"

namespace annulus {

// Not thread safe.
class ReportedOnce {
 public:
  // Returns call(), and remembers if it raises a ReportedError.
  template <typename Call>
  auto call(Call call) -> decltype(call()) {
    try {
      return call();
    } catch (const ReportedError&) {
      reported_ = true;
      throw;
    }
  }

  // Raises the error that is being handled again: as one that has been reported if a call has reported it, since what
  // has passed other ranks (comm/agreement.h) is a plain Error.
  [[noreturn]] void rethrow(const Error& error) const {
    if (reported_) throw ReportedError(error);
    throw;  // not `error`, whose type may be a derived one
  }

 private:
  bool reported_ = false;
};

}  // namespace annulus
