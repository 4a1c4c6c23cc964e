// A text and a configuration small enough for many runs in a test. Used by tests of training, inference, export and
// attend.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "runtime/config/config.h"

namespace annulus {

// A temporary folder, removed by the destructor.
class TestFolder {
 public:
  TestFolder() {
    const char* base = getenv("TEST_TMPDIR");
    std::string name = std::string(base != nullptr ? base : "/tmp") + "/run-XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~TestFolder() { std::filesystem::remove_all(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::string& path() const { return path_; }

  // Writes a file of `bytes` bytes with words drawn by a small generator, so that there is something to learn.
  std::string write_text(int64_t bytes) const {
    static const char* const words[] = {"def ",     "return ", "self.", "x = ", "for i in range(",
                                        "):\n    ", "\n",      "None"};
    std::string text;
    uint32_t state = 12345;
    while (static_cast<int64_t>(text.size()) < bytes) {
      state = state * 1664525 + 1013904223;
      text += words[state >> 29];
    }
    text.resize(bytes);
    const std::string file = path_ + "/text.txt";
    std::ofstream(file, std::ios::binary) << text;
    return file;
  }

 private:
  std::string path_;
};

inline Config tiny_config(const TestFolder& folder) {
  Config c;
  c.device = "cpu";
  c.timeout = 60;
  c.run = {.name = "tiny", .folder = folder.path() + "/runs", .seed = 1, .steps = 6, .log_every = 1};
  c.data.train = {folder.write_text(20000)};
  c.data.validation_fraction = 0.1;
  c.data.context = 64;
  c.data.batch = 4;
  c.model.layers = 2;
  c.model.dim = 32;
  c.model.heads = 4;
  c.model.kv_heads = 2;
  c.model.ffn = 64;
  c.optimizer.lr = 1e-2;
  c.optimizer.warmup = 2;
  c.validation = {.every = 0, .batches = 2};
  c.checkpoint = {.every = 0, .keep = 3};
  return c;
}

}  // namespace annulus
