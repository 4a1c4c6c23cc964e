// The version of annulus. `annulus version` prints it, and ranks compare it before they become a job.
#pragma once

namespace annulus {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace annulus
