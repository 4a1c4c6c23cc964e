// One word of `bench` (ring, train, ...), and what words have in common. Each is declared, checked and run as a verb is
// (launcher/verb.h). Most are in bench_verb.cc, the others in files of their own.
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
  virtual std::string device() const { return "cpu"; }  // as Verb::device
  virtual int run() = 0;
};

std::unique_ptr<Word> make_attention_word();
std::unique_ptr<Word> make_comm_word();

// --json FILE. check_json raises before minutes are spent on what cannot be written.
void add_json(CLI::App* app, std::string& path);
void check_json(const std::string& path);
void write_json(const std::string& path, std::vector<BenchRatio> ratios);

// Error(kUsage) inside a job of several ranks.
void refuse_ranks(const char* word);

// A folder for the file that another process of this program writes.
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
