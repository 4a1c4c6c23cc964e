// The refusal of data that cannot be read as asked. Used by the files of runtime/data/shards and data that open
// sources.
#pragma once

#include <string>

#include "common/error.h"

namespace annulus {

[[noreturn]] inline void refuse_data(const std::string& message) { throw Error(ErrorKind::kInput, "data", message); }

}  // namespace annulus
