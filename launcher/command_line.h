// What the user typed, for messages that say how to do it again. Set once by program.cc, read by verbs.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Remembers main's arguments. The name of the program is ANNULUS_PROGRAM where the script ./annulus set it.
void remember_command_line(int argc, char** argv);

// The program's name as it was typed: "./annulus".
const std::string& typed_program();

// The words of the command: "./annulus", "launch", "-n", "2", "train", "configs/quickstart.toml". What prints them
// quotes them (shell_quote of common/text.h). In a rank that `launch` started (ANNULUS_LAUNCH_COMMAND), those of
// `launch`; in one that it did not start, with `ranks` > 1, as `launch` would start as many.
std::vector<std::string> typed_words(int ranks = 1);

// The arguments after the program's name.
const std::vector<std::string>& command_arguments();

}  // namespace annulus
