// Word is a subcommand of `bench`, such as ring or train. Like a verb (launcher/verb.h) it is declared, checked and
// run. This header also has what the subcommands share. Most of them are in bench_verb.cc, the others in
// attention_word.cc and comm_word.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

class Word {
 public:
  virtual ~Word() = default;
  virtual CLI::App* declare(CLI::App& bench) = 0;
  virtual void check() {}
  virtual std::string device() const { return "cpu"; }  // see Verb::device
  virtual int run() = 0;
};

std::unique_ptr<Word> make_attention_word();
std::unique_ptr<Word> make_comm_word();

// The option --json FILE. check_json raises Error(kUsage or kResource) if the file cannot be written, before minutes
// are spent on measuring. These functions do nothing if the path is empty.
void add_json(CLI::App* app, std::string& path);
void check_json(const std::string& path);
void write_json(const std::string& path, std::vector<BenchRatio> ratios);

// Raises Error(kUsage) in a job of several ranks.
void refuse_ranks(const char* word);

// A temporary folder, for files that other processes of this program write. Its destructor removes it.
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
