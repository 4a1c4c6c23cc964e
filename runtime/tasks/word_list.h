// Common English words from which the tasks on text (task_text.h) make keys and lists. RULER draws from the thousands
// of words of the Python package wonderwords; here a few stand for them, and words with a hyphen where more are needed.
// Inside of this package only. Thread safe: constants.
#pragma once

#include <cstdint>
#include <string_view>

namespace annulus {

int64_t adjective_count();
int64_t noun_count();
std::string_view adjective(int64_t i);
std::string_view noun(int64_t i);

}  // namespace annulus
