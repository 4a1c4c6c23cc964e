// Reads environment variables and rejects invalid values. Used by every package that has such a variable.
//
// Thread safety: thread safe as long as no thread changes the environment.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace annulus {

// Returns the variable's value; null if it is unset or empty.
const char* text_from_environment(const char* name);

// Returns the variable as a number; `fallback` if it is unset or empty. Raises Error(kUsage) if it is not a number in
// [low, high].
double number_from_environment(const char* name, double fallback, double low, double high);

// Returns the variable, a number of MiB, in bytes; `fallback`, in bytes, if it is unset or empty. Raises Error(kUsage)
// if it is not a whole number from 0 to 2^20.
int64_t memory_from_environment(const char* name, int64_t fallback);

// Returns true for "1" and false for "0"; `fallback` if the variable is unset or empty. Raises Error(kUsage) for
// another value.
bool switch_from_environment(const char* name, bool fallback);

// Returns the variables whose names are wanted, with their values.
std::map<std::string, std::string> variables_from_environment(const std::function<bool(std::string_view name)>& wanted);

}  // namespace annulus
