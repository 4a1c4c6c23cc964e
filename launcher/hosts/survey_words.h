// What both sides of a survey say alike, and what of mpirun's words is worth saying. Used by survey.cc and
// survey_answer.cc.
#pragma once

#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "common/checked_json.h"

namespace annulus {

constexpr size_t kLongestSurveyLine = size_t{64} << 20;

// One line, without its end. What the system said need not be UTF-8.
inline std::string survey_line(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// A list of texts; Error(kInput) where it is something else.
std::vector<std::string> texts_in(const CheckedJson& list);

inline double utc_now() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The few lines of mpirun's output that say what went wrong: those outside of its frames (ssh's, a shell's), else the
// beginning of the first frame, up to its list of what might be the cause. In one line.
std::string words_of_mpirun(std::string_view text);

}  // namespace annulus
