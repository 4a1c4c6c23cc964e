// The program annulus_bench. It has the subcommand `bench`, the subcommand `launch`, which starts its ranks, and the
// hidden subcommands that the discovery of their hosts starts. It is a program of its own, so that the program that
// trains neither contains benchmarks nor waits until they are built. `annulus bench` executes it (launcher/program.h).
#include <memory>
#include <vector>

#include "launcher/program.h"
#include "launcher/subcommand.h"

namespace annulus {

std::unique_ptr<Subcommand> make_bench_subcommand();

const std::vector<SubcommandEntry>& subcommands() {
  static const std::vector<SubcommandEntry> table = {
      {"launch", "start, watch and stop the ranks of `bench`", false, make_launch_subcommand},
      {"bench", "measure, side by side with a baseline, in one run", true, make_bench_subcommand},
      {.name = "version", .help = "", .ranks = false, .make = make_version_subcommand, .hidden = true},
      {.name = "host", .help = "", .ranks = false, .make = make_host_subcommand, .hidden = true},
  };
  return table;
}

}  // namespace annulus

int main(int argc, char** argv) { annulus::run_program(argc, argv); }
