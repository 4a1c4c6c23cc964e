// Runs of the trainer over threads, and readers of what they write. Used by tests of training, inference and export.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/config/config.h"
#include "runtime/training/trainer.h"

namespace annulus {

struct Result {
  int code = 0;
  std::string out;
};

// Trains on `ranks` threads. On the last rank, call number `stop_at` of the stop callback asks to stop; 0 never asks.
inline Result train(const Config& config, int ranks, std::optional<std::string> resume = std::nullopt,
                    int stop_at = 0) {
  std::ostringstream out;
  std::atomic<int> code{0};
  run_ranks(ranks, [&](Communicator& world) {
    int calls = 0;
    TrainOptions options;
    options.resume = resume;
    options.program = "my tools/annulus";
    options.command = {options.program, "launch", "-n", std::to_string(ranks), "train", "tiny.toml"};
    for (const char* word : {"--resume", "old", "--set", "run.steps=9", "--set", "a.b=it's", "--resume=older"}) {
      options.command.emplace_back(word);
    }
    options.out = &out;
    options.stop = [&] { return ++calls == stop_at && world.rank() == ranks - 1; };
    const int c = run_training(config, world, options);
    if (world.rank() == 0) code = c;
  });
  return {code, out.str()};
}

// Makes updates so small that they change no weight except those that are exactly 0.
inline void still(OptimizerSection& optimizer) {
  optimizer.lr = 1e-30;
  optimizer.warmup = 0;
  optimizer.weight_decay = 0;
}

// The lines of metrics.jsonl with the key `of` ("started", "checkpoint", "slow_rank", ...), or those with none of
// these: of steps, validations and returns. (A busy machine may well make a rank slow.)
inline std::vector<nlohmann::json> metrics(const std::string& run, const std::string& of = "") {
  std::ifstream in(run + "/metrics.jsonl");
  std::vector<nlohmann::json> out;
  for (std::string line; std::getline(in, line);) {
    nlohmann::json json = nlohmann::json::parse(line);
    const auto has = [&](const char* key) { return json.contains(key); };
    const bool other = has("started") || has("checkpoint") || has("slow_rank") || has("slow_rank_over");
    const bool wanted = of.empty() ? !other : has(of.c_str());
    if (wanted) out.push_back(std::move(json));
  }
  return out;
}

inline std::vector<double> losses(const std::string& run) {
  std::vector<double> out;
  for (const nlohmann::json& m : metrics(run)) {
    if (m.contains("loss")) out.push_back(m["loss"]);
  }
  return out;
}

inline std::string file_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// The bytes of a file of the run's checkpoint of this step.
inline std::string checkpoint_bytes(const std::string& run, int64_t step, const std::string& file) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return file_text(run + "/checkpoints/" + name + "/" + file);
}

// The contents of the safetensors files in the run's checkpoint of this step, by file name.
inline std::map<std::string, std::string> checkpoint_tensors(const std::string& run, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(run + "/checkpoints/" + name)) {
    if (entry.path().extension() == ".safetensors") files[entry.path().filename()] = file_text(entry.path());
  }
  EXPECT_FALSE(files.empty());
  return files;
}

}  // namespace annulus
