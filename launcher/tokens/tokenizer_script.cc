// See tokenizer_script.h.
#include "launcher/tokens/tokenizer_script.h"

#include "launcher/python_programs/script.h"

namespace annulus {

std::vector<std::string> tokenizer_command(const std::vector<std::string>& words) {
  return script_command("tokenizer", "tokenize", "the tokenizer libraries", words);
}

}  // namespace annulus
