// See run_messages.h.
#include "runtime/run/run_messages.h"

#include "common/text.h"

namespace annulus {

std::string short_count(double value) {
  if (value >= 1e12) return rounded(value / 1e12, 2) + "T";
  if (value >= 1e9) return rounded(value / 1e9, 2) + "B";
  if (value >= 1e6) return rounded(value / 1e6, 2) + "M";
  if (value >= 1e3) return rounded(value / 1e3, 1) + "k";
  return rounded(value, 0);
}

std::string instructions_change(const std::string& was, const std::string& now) {
  return "changed: vector instructions " + now + " (they were " + was +
         "): sums round differently from here on, so the bits are not those of an uninterrupted run";
}

Words without_option(const Words& command, const std::string& option, const std::string& value) {
  Words kept;
  for (auto word = command.begin(); word != command.end(); ++word) {
    if (word->starts_with(option + "=" + value)) continue;
    if (*word == option) {
      const auto next = word + 1;
      if (next != command.end() && !next->starts_with("-") && next->starts_with(value)) {
        ++word;
        continue;
      }
      if (value.empty()) continue;
    }
    kept.push_back(*word);
  }
  return kept;
}

}  // namespace annulus
