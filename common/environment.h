// Reads environment variables and refuses values that make no sense. Used by every room that has such a variable.
//
// Thread safety: these functions are thread safe as long as no thread changes the environment.
#pragma once

namespace annulus {

// The text of the variable; null if it is not set or empty.
const char* text_from_environment(const char* name);

// The variable as a number; `fallback` if it is not set or empty. Raises Error(kUsage) if it is not a number in
// [low, high].
double number_from_environment(const char* name, double fallback, double low, double high);

// Whether the variable is 1 rather than 0; `fallback` if it is not set or empty. Raises Error(kUsage) for another
// value.
bool switch_from_environment(const char* name, bool fallback);

}  // namespace annulus
