// The script ./annulus, which starts what is not of this program: making tokens takes the libraries of tokenizers,
// which are Python's (tokenization/). Used by verb_tokenize.cc and sample_tokenizer.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The command `./annulus tokenizer WORDS...`, for exec. Raises Error(kUnavailable) where this program was not started
// by the script and does not know where it is.
std::vector<std::string> tokenizer_command(const std::vector<std::string>& words);

}  // namespace annulus
