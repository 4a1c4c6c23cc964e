// The command with which the script ./annulus starts the tokenizer libraries, which are written for Python
// (python/tokenizer/). Used by subcommands/tokenize.cc and tokenizer_process.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The words of `./annulus tokenizer WORDS...`, for exec. Throws Error(kUnavailable) if this program was not started by
// the script (ANNULUS_SCRIPT) or the script cannot be run.
std::vector<std::string> tokenizer_command(const std::vector<std::string>& words);

}  // namespace annulus
