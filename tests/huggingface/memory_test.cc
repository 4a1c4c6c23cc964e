// What reading a model takes of the host's memory is what was said: the slices that are read into, and one block.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "huggingface/weights.h"
#include "tests/huggingface/folders.h"
#include "training/run/checkpoint_manifest.h"

namespace annulus {
namespace {

// "VmRSS", "VmHWM": bytes that the process has now, and had at most.
int64_t status(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return 0;
}

// What was freed goes back to the system, and from here on VmHWM counts anew.
void forget_peak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";
}

TEST(Memory, OfReadingAModel) {
  const ModelShape shape{
      .layers = 8, .dim = 512, .heads = 8, .kv_heads = 4, .ffn = 1536, .vocab = 16384, .head_size = 64};
  const std::string folder = fresh_folder("large");
  write_weights(folder, weights_of(shape, at::kBFloat16), 4);
  const ModelWeights weights(folder, shape);
  const std::vector<TensorSlice> warm = {
      {"model.norm.weight", {512}, 0, at::empty({512}, at::TensorOptions().dtype(at::kFloat))}};
  weights.read(warm);
  forget_peak();
  const int64_t before = status("VmRSS");
  const std::vector<TensorSlice> slices = empty_slices(shape);
  weights.read(slices);
  const double taken = static_cast<double>(status("VmHWM") - before);
  const double said = static_cast<double>(4 * parameter_count(shape) + kBlockBytes);
  EXPECT_GT(said, 150e6);
  EXPECT_NEAR(taken / said, 1, 0.1);
}

}  // namespace
}  // namespace annulus
