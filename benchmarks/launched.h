// What benchmarks need that start ranks of their own: the job, and a folder for files that its ranks write. Used by
// comm.cc, seeds/, program/bench_subcommand.cc and program/save.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Starts this program's ranks with these arguments, all in one ring, and returns the exit code (launcher/launch).
// The environment is as before afterwards.
int launch_ranks(int ranks, std::vector<std::string> arguments);

// A temporary folder in the folder `in`, or where temporary files are. Its destructor removes it. The constructor
// raises Error(kResource).
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& in = "");
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace annulus
