// Common English words from which the tasks on text (task_text.h) make keys and lists. RULER draws from the thousands
// of words of the Python package wonderwords; here a few stand for them, and words with a hyphen where more are needed.
// Inside of this package only. Thread safe: constants.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace annulus {

// No word stands in both.
std::span<const std::string_view> adjectives();
std::span<const std::string_view> nouns();

}  // namespace annulus
