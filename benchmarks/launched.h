// What benchmarks need that start ranks of their own: the job, and a folder for files that its ranks write. Used by
// comm.cc, seeds/ and program/bench_subcommand.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Starts this program's ranks with these arguments, all in one ring, and returns the exit code (launcher/launch).
// The environment is as before afterwards.
int launch_ranks(int ranks, std::vector<std::string> arguments);

// A temporary folder. Its destructor removes it. The constructor raises Error(kResource).
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace annulus
