// What the programs annulus and annulus_bench have in common: find the verb (verb.h), read its options, run it, and
// turn errors into one message and an exit code.
#pragma once

#include "launcher/verb.h"

namespace annulus {

// main(), for a program that defines verbs(). Returns its exit code.
int run_program(int argc, char** argv);

// Becomes the program that has this verb, with this command line. Raises Error(kUnavailable) where it is not built.
[[noreturn]] void run_other_program(const VerbEntry& entry);

}  // namespace annulus
