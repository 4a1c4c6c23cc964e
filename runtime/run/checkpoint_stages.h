// Stages of a collective function on checkpoints, after each of which all ranks go on or all raise one error. Used by
// checkpoint.cc and checkpoint_save.cc.
#pragma once

#include <functional>
#include <string>

#include "comm/agreement.h"
#include "comm/communicator.h"

namespace annulus {

// Like failure_of_any, but raises the failure, which is the same on every rank, including the one that failed.
inline void stage(Communicator& comm, OpLabel label, const std::function<void()>& action) {
  if (const auto error = failure_of_any(comm, label, action)) throw *error;
}

// Returns rank 0's text on every rank.
inline std::string text_of_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make) {
  std::string text;
  stage(comm, label, [&] {
    if (comm.rank() == 0) text = make();
  });
  return all_gather_text(comm, text, label)[0];
}

}  // namespace annulus
