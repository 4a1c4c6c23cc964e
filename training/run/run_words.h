// Numbers and commands as a run says them. Used by trainer.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// 1267008 -> "1.27M"
std::string short_count(double value);

// What a run that is resumed on a CPU with other vector instructions says of it.
std::string instructions_change(const std::string& was, const std::string& now);

using Words = std::vector<std::string>;
// Leaves out OPTION where its value begins with `value`, be they one word, OPTION=VALUE, or two; with an empty `value`
// also OPTION alone. A word that begins with "-" is the next option.
Words without_option(const Words& command, const std::string& option, const std::string& value = "");

}  // namespace annulus
