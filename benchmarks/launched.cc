// Implements launched.h.
#include "benchmarks/launched.h"

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "common/error.h"
#include "launcher/command_line.h"
#include "launcher/launch/launch.h"

namespace annulus {

int launch_ranks(int ranks, std::vector<std::string> arguments) {
  LaunchOptions launch;
  launch.ranks = launch.context = ranks;
  launch.program = std::move(arguments);
  launch.typed = typed_words();
  return run_launch(launch);
}

ScratchFolder::ScratchFolder() : path_((std::filesystem::temp_directory_path() / "annulus-bench-XXXXXX").string()) {
  if (mkdtemp(path_.data()) == nullptr) {
    throw Error(ErrorKind::kResource, "bench",
                "cannot make the folder " + path_ + "; set TMPDIR to a folder that can be written");
  }
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace annulus
