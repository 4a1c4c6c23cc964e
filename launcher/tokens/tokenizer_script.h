// The command with which the script ./annulus starts the tokenizer libraries, which are written for Python
// (python/tokenizer/). Used by subcommands/tokenize.cc and tokenizer_process.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The words of `./annulus tokenizer WORDS...`, for exec. Throws Error(kUnavailable) as script_command() does
// (launcher/python_programs/script.h).
std::vector<std::string> tokenizer_command(const std::vector<std::string>& words);

}  // namespace annulus
