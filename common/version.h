// The version of annulus. `annulus version` prints it, and ranks compare it when they form a job.
#pragma once

namespace annulus {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace annulus
