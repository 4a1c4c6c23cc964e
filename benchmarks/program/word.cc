// Implements what word.h declares for all subcommands.
#include "benchmarks/program/word.h"

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "comm/launch_info.h"
#include "common/error.h"
#include "common/files.h"

namespace annulus {

void add_json(CLI::App* app, std::string& path) {
  app->add_option("--json", path, "write the ratios to a file that `bench compare` reads")->type_name("FILE");
}

void check_json(const std::string& path) {
  if (!path.empty()) require_output("bench", "--json " + path, path);
}

void write_json(const std::string& path, std::vector<BenchRatio> ratios) {
  if (!path.empty()) write_report(report_of(std::move(ratios)), path);
}

void refuse_ranks(const char* word) {
  const LaunchInfo info = launch_info();
  if (info.launched && info.size > 1) {
    throw Error(ErrorKind::kUsage, "bench",
                std::string(word) + " runs on one rank; run it without launch: ./annulus bench " + word);
  }
}

ScratchFolder::ScratchFolder() {
  path_ = (std::filesystem::temp_directory_path() / "annulus-bench-XXXXXX").string();
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
