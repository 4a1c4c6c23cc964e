// The entry point of the program `annulus`. verbs.cc lists its verbs.
#include "launcher/program.h"

int main(int argc, char** argv) { annulus::run_program(argc, argv); }
