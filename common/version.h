// The version of annulus: printed by `annulus version`, and part of what ranks compare before they become a job.
#pragma once

namespace annulus {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace annulus
