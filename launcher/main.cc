// The entry point of the program `annulus`. subcommands.cc lists its subcommands.
#include "launcher/program.h"

int main(int argc, char** argv) { annulus::run_program(argc, argv); }
