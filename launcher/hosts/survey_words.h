// What both sides of a survey use, and the part of mpirun's output that messages quote. Used by
// survey.cc and survey_answer.cc. Thread safe: functions without state.
#pragma once

#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "common/checked_json.h"

namespace annulus {

// The elements of a list of texts. Throws Error(kInput) if it is not one.
std::vector<std::string> texts_in(const CheckedJson& list);

// The current UTC time in seconds since 1970.
inline double utc_now() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The few lines of mpirun's output that say what went wrong, joined into one line: those outside its frames of dashes,
// which come from ssh or a shell, or else the first frame up to its list of possible causes. Warnings are left out
// unless there is nothing else.
std::string words_of_mpirun(std::string_view text);

}  // namespace annulus
