// Tests that reading and exporting a model take as much host memory as `annulus inspect` reports.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/config/config.h"
#include "runtime/huggingface/export.h"
#include "runtime/huggingface/weights.h"
#include "runtime/inference/inspection.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_manifest.h"
#include "tests/runtime/huggingface/folders.h"

namespace annulus::memory_test {
namespace {

// The bytes of resident memory: "VmRSS" is the current value and "VmHWM" the peak.
int64_t status(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return 0;
}

// Returns freed memory to the system and resets VmHWM.
void forget_peak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";
}

ModelShape large() {
  return {.layers = 8, .dim = 512, .heads = 8, .kv_heads = 4, .ffn = 1536, .vocab = 16384, .head_size = 64};
}

// The kernel may give the heap pages of 2 MiB, of which the first and the last are only partly used.
void expect_taken(double taken, int64_t said) {
  EXPECT_NEAR(taken, static_cast<double>(said), 0.1 * static_cast<double>(said) + 2 * (2 << 20));
}

TEST(Memory, ReadingAModelTakesWhatInspectReports) {
  const ModelShape shape = large();
  const std::string folder = fresh_folder("large");
  write_text(folder + "/config.json", llama_config(shape).dump());
  write_weights(folder, weights_of(shape, at::kBFloat16), 4);
  const Inspection said = inspect_model(folder, "runs", 64);
  const ModelWeights weights(folder, shape);
  const std::vector<TensorSlice> warm = {
      {"model.norm.weight", {512}, 0, at::empty({512}, at::TensorOptions().dtype(at::kFloat))}};
  weights.read(warm);
  forget_peak();
  const int64_t before = status("VmRSS");
  const std::vector<TensorSlice> slices = empty_slices(shape);
  weights.read(slices);
  EXPECT_GT(said.import_bytes, 150'000'000);
  expect_taken(static_cast<double>(status("VmHWM") - before), said.import_bytes);
}

TEST(Memory, ExportingAModelTakesWhatInspectReports) {
  const std::string run = fresh_folder("run");
  Config config;
  config.run.steps = 1;
  config.data.train = {"nothing"};
  config.optimizer.lr = 1;
  static_cast<ModelShape&>(config.model) = large();
  for (const char* dtype : {"fp32", "bf16"}) {
    config.model.dtype = dtype;
    write_text(run + "/config.toml", to_toml(config));
    std::vector<TensorSlice> slices;
    for (const auto& [name, tensor] : weights_of(large())) {
      slices.push_back({name, tensor.sizes().vec(), 0, tensor.view({-1})});
    }
    CheckpointStore(run, 1).save(*make_self_communicator(), {.step = 1}, slices);
    slices.clear();
    const Inspection said = inspect_model(run, "runs", 64);
    const auto passed_over = [](const std::string& reason) { ADD_FAILURE() << reason; };
    export_model({.run = run, .out = fresh_folder("parent") + "/warm"}, passed_over);
    forget_peak();
    const int64_t before = status("VmRSS");
    export_model({.run = run, .out = fresh_folder("parent") + "/out"}, passed_over);
    EXPECT_GE(said.export_bytes, kBlockBytes);
    expect_taken(static_cast<double>(status("VmHWM") - before), said.export_bytes);
  }
}

}  // namespace
}  // namespace annulus::memory_test
