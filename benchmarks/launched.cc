// Implements launched.h.
#include "benchmarks/launched.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "common/error.h"
#include "launcher/command_line.h"
#include "launcher/launch/launch.h"

namespace annulus {
namespace {

// While it exists, this process may change its environment, which is as before afterwards. run_launch sets variables
// for the ranks that it starts (ANNULUS_WORLD_SIZE); what runs here after them is no rank.
class KeepsEnvironment {
 public:
  KeepsEnvironment() {
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      const size_t end = text.find('=');
      if (end != std::string::npos) variables_.emplace_back(text.substr(0, end), text.substr(end + 1));
    }
  }
  ~KeepsEnvironment() {
    clearenv();
    for (const auto& [name, value] : variables_) setenv(name.c_str(), value.c_str(), 1);
  }
  KeepsEnvironment(const KeepsEnvironment&) = delete;
  KeepsEnvironment& operator=(const KeepsEnvironment&) = delete;

 private:
  std::vector<std::pair<std::string, std::string>> variables_;
};

}  // namespace

int launch_ranks(int ranks, std::vector<std::string> arguments) {
  const KeepsEnvironment kept;
  LaunchOptions launch;
  launch.ranks = ranks;
  launch.program = std::move(arguments);
  launch.typed = typed_words();
  return run_launch(launch);
}

ScratchFolder::ScratchFolder(const std::string& in)
    : path_((in.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(in)) /
            "annulus-bench-XXXXXX") {
  if (mkdtemp(path_.data()) == nullptr) {
    throw Error(ErrorKind::kResource, "bench",
                "cannot make the folder " + path_ + "; expected a folder that can be written" +
                    (in.empty() ? ", which TMPDIR names" : ""));
  }
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace annulus
