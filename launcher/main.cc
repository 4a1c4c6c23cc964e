// The program `annulus`. Its verbs: verbs.cc.
#include "launcher/program.h"

int main(int argc, char** argv) { return annulus::run_program(argc, argv); }
