// A tool of rotary_tables_test.py that writes the rotary table of a layer: rotary_tool FOLDER LAYER IN OUT. FOLDER has
// a config.json and IN the tensor `positions` [n] int64; OUT gets `cosine` and `sine` [n, head_dim / 2] in fp32.
#include <cstdio>
#include <cstdlib>

#include "attention/modules/rotary.h"
#include "common/error.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/tensor_files/safetensors.h"

int main(int argc, char** argv) {
  using namespace annulus;
  if (argc != 5) return 2;
  try {
    const ModelSection model = read_model_config(argv[1]);
    const RotaryTable table = make_rotary_table(SafetensorsFile(argv[3]).load("positions"),
                                                model.rotary(std::atoll(argv[2])), at::kFloat, at::kCPU);
    write_safetensors(argv[4], {{"cosine", table.cosine}, {"sine", table.sine}});
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
  }
  return 0;
}
