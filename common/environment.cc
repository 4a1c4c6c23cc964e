// See environment.h.
#include "common/environment.h"

#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

// The number as text, whole numbers without an exponent.
std::string plain(double value) {
  return value == std::floor(value) && std::abs(value) < 1e15 ? std::to_string(static_cast<int64_t>(value))
                                                              : exact(value);
}

[[noreturn]] void refuse(const char* name, const char* text, const std::string& expected) {
  throw Error(ErrorKind::kUsage, "environment",
              std::string("environment variable ") + name + " is \"" + text + "\": expected " + expected +
                  "; correct or unset it");
}

}  // namespace

const char* text_from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

double number_from_environment(const char* name, double fallback, double low, double high) {
  const char* text = text_from_environment(name);
  if (text == nullptr) return fallback;
  const auto value = number_of_text<double>(text);
  if (value && std::isfinite(*value) && *value >= low && *value <= high) return *value;
  refuse(name, text, "a number from " + plain(low) + " to " + plain(high));
}

int64_t memory_from_environment(const char* name, int64_t fallback) {
  constexpr int64_t kMostMib = int64_t{1} << 20;
  const char* const text = text_from_environment(name);
  if (text == nullptr) return fallback;
  const int64_t mib = number_of_text<int64_t>(text).value_or(-1);
  if (mib < 0 || mib > kMostMib) refuse(name, text, "a whole number of MiB from 0 to " + std::to_string(kMostMib));
  return mib << 20;
}

bool switch_from_environment(const char* name, bool fallback) {
  const char* const text = text_from_environment(name);
  if (text == nullptr) return fallback;
  const std::string_view given = text;
  if (given != "1" && given != "0") refuse(name, text, "1 or 0");
  return given == "1";
}

std::map<std::string, std::string> variables_from_environment(
    const std::function<bool(std::string_view name)>& wanted) {
  std::map<std::string, std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos || !wanted(text.substr(0, equals))) continue;
    found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

}  // namespace annulus
