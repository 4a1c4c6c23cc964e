// See script.h.
#include "launcher/python_programs/script.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/environment.h"
#include "common/error.h"

namespace annulus {
namespace {

std::vector<char*> argv_of(std::vector<std::string>& command) {
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  return argv;
}

}  // namespace

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

void become(std::vector<std::string> command, std::string_view module) {
  std::fflush(nullptr);
  execv(command[0].c_str(), argv_of(command).data());
  throw Error(ErrorKind::kUnavailable, module, command[0] + " cannot be run: " + std::strerror(errno));
}

int spawn(std::vector<std::string> command, posix_spawn_file_actions_t& actions, short flags, pid_t& child) {
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, static_cast<short>(POSIX_SPAWN_SETSIGMASK | flags));
  const int wrong = posix_spawn(&child, command[0].c_str(), &actions, &attributes, argv_of(command).data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return wrong;
}

}  // namespace annulus
