// What the programs annulus and annulus_bench have in common: they find the subcommand (subcommand.h), read its
// options, run it, and turn an error into one message and an exit code.
#pragma once

#include "launcher/subcommand.h"

namespace annulus {

// The body of main() for a program that defines subcommands(). Ends the process with the exit code, without running the
// destructors of static objects.
[[noreturn]] void run_program(int argc, char** argv);

// Replaces this process by the program that has this subcommand, with the same command line. Throws Error(kUnavailable)
// if that program is not built.
[[noreturn]] void run_other_program(const SubcommandEntry& entry);

}  // namespace annulus
