// The commands with which the script ./annulus starts the programs of this tree that are written for Python
// (python/tokenizer/, python/follower/), after it has made sure that their libraries are there. Used by follower.cc and
// launcher/tokens/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The words of `./annulus COMMAND WORDS...`, for exec. Throws Error(kUnavailable) of the module `module` if this
// program was not started by the script (ANNULUS_SCRIPT) or the script cannot be run; `libraries` begins the message.
std::vector<std::string> script_command(const std::string& command, std::string_view module,
                                        const std::string& libraries, const std::vector<std::string>& words);

}  // namespace annulus
