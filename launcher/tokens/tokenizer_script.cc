// See tokenizer_script.h.
#include "launcher/tokens/tokenizer_script.h"

#include <unistd.h>

#include "common/environment.h"
#include "common/error.h"

namespace annulus {

std::vector<std::string> tokenizer_command(const std::vector<std::string>& words) {
  const char* const script = text_from_environment("ANNULUS_SCRIPT");
  if (script == nullptr || access(script, X_OK) != 0) {
    throw Error(ErrorKind::kUnavailable, "tokenize",
                "the tokenizer libraries are started by the script ./annulus in annulus's folder, but " +
                    (script == nullptr ? std::string("this program was started without it")
                                       : std::string(script) + " cannot be run") +
                    ": start it as ./annulus");
  }
  std::vector<std::string> command = {script, "tokenizer"};
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

}  // namespace annulus
