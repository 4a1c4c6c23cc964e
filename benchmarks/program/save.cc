// `annulus bench save`: for how long training stands still while a checkpoint is written, with training waiting for it
// and behind training (checkpoint.background).
#include <ATen/Parallel.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/launched.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "comm/agreement.h"
#include "runtime/data/dataset.h"
#include "runtime/run/checkpoint_save.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

class SaveBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--layers", llama_.layers, "layers");
    add(app, "--dim", llama_.dim, "width, a multiple of 16");
    add(app, "--folder", folder_, "where checkpoints are written");
    add(app, "--repeats,--rounds", rounds_, "rounds that count");
    app.footer(
        "It starts 2 ranks itself if `launch` has not started them.\n"
        "Example:\n  ./annulus bench save --folder .");
  }

  // In each round one checkpoint is written while training waits, and one behind training. Of both the longest time of
  // any rank counts.
  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    at::set_num_threads(1);
    llama_.steps = 1 << 20;
    const Config config = config_of(llama_);
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    Training training(config, world, data, at::kCPU);
    training.step();  // touches memory for the first time
    std::optional<ScratchFolder> of_first;
    CheckpointStore store(from_first(world, {"making a folder"}, [&] { return of_first.emplace(folder_).path(); }), 1);
    std::vector<double> waiting, behind, until_there;
    const auto most = [&](double mine) { return over_ranks(world, {mine}, ReduceOp::kMax)[0]; };
    for (int64_t round = 0; round <= rounds_; ++round) {  // the first one takes memory, and does not count
      training.step();
      world.barrier({"a round of the benchmark", round, "round"});
      const double begin = wall_seconds();
      store.save(world, training.state(), training.slices_to_write());
      const double waited = most(wall_seconds() - begin);
      training.step();
      world.barrier({"a round of the benchmark", round, "round"});
      const double begun = wall_seconds();
      CheckpointSave save(store, world, training.state(), training.slices_to_write(), CheckpointSave::Writes::kBehind);
      double stopped = wall_seconds() - begun;
      while (!save.published()) {
        training.step();
        const double before = wall_seconds();
        save.advance();
        stopped += wall_seconds() - before;
      }
      const double there = wall_seconds() - begun;
      save.finish();
      stopped = most(stopped);
      if (round == 0) continue;
      waiting.push_back(waited);
      behind.push_back(stopped);
      until_there.push_back(there);
    }
    if (world.rank() != 0) return {};

    const int64_t parameters = training.model().parameters().count();
    const std::string settings = line("a Llama of %lld parameters, %lld ranks of one thread, %.1f MB a checkpoint",
                                      parameters, world.size(), static_cast<double>(12 * parameters) / 1e6);
    const BenchRatio ratio = ratio_of("save/behind training", settings, behind, waiting);
    out << settings << line("; medians of %lld rounds\n\n", rounds_)
        << line("  training waits              %8.4f s a checkpoint\n", median(waiting))
        << line("  behind training, it waits   %8.4f s, and the checkpoint is there after %.4f s\n", median(behind),
                median(until_there))
        << line("  ratio                       %8.3f (quartiles %.3f to %.3f)\n", ratio.ratio, ratio.low, ratio.high)
        << "\n"
        << nlohmann::json{{"bench", "save"},
                          {"ranks", world.size()},
                          {"parameters", parameters},
                          {"waiting_seconds", median(waiting)},
                          {"behind_seconds", median(behind)},
                          {"behind_until_there_seconds", median(until_there)},
                          {"behind_over_waiting", ratio.ratio}}
               .dump()
        << std::endl;
    return {ratio};
  }

 private:
  SmallLlama llama_ = {.dim = 512, .heads = 8, .kv_heads = 4, .ffn = 1376, .context = 256};
  int64_t rounds_ = 10;
  std::string folder_ = std::filesystem::temp_directory_path().string();
};

}  // namespace

std::unique_ptr<Benchmark> make_save_benchmark() { return std::make_unique<SaveBenchmark>(); }

}  // namespace annulus
