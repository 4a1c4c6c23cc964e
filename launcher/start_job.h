// From a process to a rank of a job, for the verbs that run on ranks: bootstrap with what this program compares.
#pragma once

#include <string>
#include <vector>

#include "comm/bootstrap/bootstrap.h"

namespace annulus {

// Collective. `fields`: what must be the same on all ranks beside the version. Raises as bootstrap does; a message that
// concerns all ranks is printed once.
Job start_job(std::vector<Field> fields, const std::string& device = "cpu");

}  // namespace annulus
