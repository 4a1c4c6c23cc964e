// What the user typed, for messages that say how to do it again. Set once by program.cc, read by verbs.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Remembers main's arguments. The name of the program is ANNULUS_PROGRAM where the script ./annulus set it.
void remember_command_line(int argc, char** argv);

// The program's name as it was typed: "./annulus".
const std::string& typed_program();

// As it would be typed into a shell: "./annulus launch -n 2 train configs/quickstart.toml".
// `ranks` > 1, in a rank that `launch` did not start: as `launch` would start as many.
std::string typed_command(int ranks = 1);

// The arguments after the program's name.
const std::vector<std::string>& command_arguments();

}  // namespace annulus
