// Starts programs of this tree that are written for Python (python/tokenizer/, python/follower/) through the script
// ./annulus, which first makes sure that their libraries are there. Used by follower.cc, launcher/tokens/ and the
// subcommands tokenize and report.
#pragma once

#include <spawn.h>

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The words of `./annulus COMMAND WORDS...`, for exec. Throws Error(kUnavailable) of the module `module` if this
// program was not started by the script (ANNULUS_SCRIPT) or the script cannot be run; `libraries` begins the message.
std::vector<std::string> script_command(const std::string& command, std::string_view module,
                                        const std::string& libraries, const std::vector<std::string>& words);

// Replaces this process by the command. Throws Error(kUnavailable) of the module `module` if it cannot be run.
[[noreturn]] void become(std::vector<std::string> command, std::string_view module);

// Starts the command as a child in which no signal is blocked: this process blocks Ctrl-C (common/interrupt.h). `flags`
// are further ones of posix_spawnattr_setflags(). Destroys `actions`. Returns 0, or why it could not be started
// (errno).
int spawn(std::vector<std::string> command, posix_spawn_file_actions_t& actions, short flags, pid_t& child);

}  // namespace annulus
