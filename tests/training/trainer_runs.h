// Runs of the trainer over threads, and what they leave. For the tests of the trainer and the sampler.
#pragma once

#include <atomic>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "config/config.h"
#include "training/trainer.h"

namespace annulus {

struct Result {
  int code = 0;
  std::string out;
};

// `stop_at`: the call (counted on rank 1, or 0 where there is one rank) that asks to stop; 0: none.
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

inline std::vector<nlohmann::json> metrics(const std::string& run) {
  std::ifstream in(run + "/metrics.jsonl");
  std::vector<nlohmann::json> out;
  for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
  return out;
}

inline std::vector<double> losses(const std::string& run) {
  std::vector<double> out;
  for (const nlohmann::json& m : metrics(run)) {
    if (m.contains("loss")) out.push_back(m["loss"]);
  }
  return out;
}

}  // namespace annulus
