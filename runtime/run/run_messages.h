// Formats numbers and commands for the messages of a run. Used by trainer.cc. Thread safety: functions without state.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Returns "1.27M" for 1267008.
std::string short_count(double value);

// Returns the message of a run that is resumed on a CPU with other vector instructions.
std::string instructions_change(const std::string& was, const std::string& now);

using Words = std::vector<std::string>;
// Returns `command` without occurrences of `option` whose value begins with `value`, as one word (OPTION=VALUE) or two.
// With an empty `value`, also removes the option without a value, that is if the next word begins with "-". Example:
// without {"--set", "run.steps="}, {"train", "--set", "run.steps=9", "--resume"} becomes {"train", "--resume"}.
Words without_option(const Words& command, const std::string& option, const std::string& value = "");

}  // namespace annulus
