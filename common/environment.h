// Environment variables that say something to this program, read so that nonsense is refused. Used by every room that
// has such a variable.
#pragma once

namespace annulus {

// All of these are thread-safe as long as nobody changes the environment.

// The variable's text; null where it is not set or empty.
const char* text_from_environment(const char* name);

// The variable as a number, `fallback` where it is not set or empty. Raises Error(kUsage) where it is no number in
// [low, high].
double number_from_environment(const char* name, double fallback, double low, double high);

// A variable that is 1 or 0; `fallback` where it is not set or empty. Raises Error(kUsage) for another value.
bool switch_from_environment(const char* name, bool fallback);

}  // namespace annulus
