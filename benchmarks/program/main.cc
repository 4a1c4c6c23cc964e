// The program annulus_bench. It has the verb `bench`, the verb `launch`, which starts its ranks, and the hidden verbs
// that the discovery of their hosts starts. It is a program of its own, so that the program that trains neither
// contains benchmarks nor waits until they are built. `annulus bench` executes it (launcher/program.h).
#include <memory>
#include <vector>

#include "launcher/program.h"
#include "launcher/verb.h"

namespace annulus {

std::unique_ptr<Verb> make_bench_verb();

const std::vector<VerbEntry>& verbs() {
  static const std::vector<VerbEntry> table = {
      {"launch", "start, watch and stop the ranks of `bench`", false, make_launch_verb},
      {"bench", "measure, side by side with a baseline, in one run", true, make_bench_verb},
      {.name = "version", .help = "", .ranks = false, .make = make_version_verb, .hidden = true},
      {.name = "host", .help = "", .ranks = false, .make = make_host_verb, .hidden = true},
  };
  return table;
}

}  // namespace annulus

int main(int argc, char** argv) { annulus::run_program(argc, argv); }
