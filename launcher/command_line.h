// The command line that the user typed, for messages that say how to run something again. program.cc sets it once;
// subcommands and the benchmarks read it. Setting it is not thread safe; reading it afterwards is.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Remembers main's arguments. If the script ./annulus set ANNULUS_PROGRAM, that is the name of the program.
void remember_command_line(int argc, char** argv);

// The program's name as it was typed: "./annulus".
const std::string& typed_program();

// The words of the command: "./annulus", "launch", "-n", "2", "train", "configs/quickstart.toml". Callers that print
// them must quote them (shell_quote in common/text.h). In a rank that `launch` started, these are the words of the
// `launch` command (ANNULUS_LAUNCH_COMMAND). In any other process with `ranks` > 1, "launch -n RANKS" is inserted.
std::vector<std::string> typed_words(int ranks = 1);

// The arguments after the program's name.
const std::vector<std::string>& command_arguments();

}  // namespace annulus
