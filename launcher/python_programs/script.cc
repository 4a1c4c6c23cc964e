// See script.h.
#include "launcher/python_programs/script.h"

#include <unistd.h>

#include "common/environment.h"
#include "common/error.h"

namespace annulus {

std::vector<std::string> script_command(const std::string& command, std::string_view module,
                                        const std::string& libraries, const std::vector<std::string>& words) {
  const char* const script = text_from_environment("ANNULUS_SCRIPT");
  if (script == nullptr || access(script, X_OK) != 0) {
    throw Error(ErrorKind::kUnavailable, module,
                libraries + " are started by the script ./annulus in annulus's folder, but " +
                    (script == nullptr ? std::string("this program was started without it")
                                       : std::string(script) + " cannot be run") +
                    ": start it as ./annulus");
  }
  std::vector<std::string> all = {script, command};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

}  // namespace annulus
