// The configuration that benchmarks of training steps use: a Llama over the bytes of the default corpus, on the CPU.
// Used by train.cc, shard.cc, longest.cc, comm.cc, counts.cc, program/save.cc and program/observation.cc.
#pragma once

#include <cstdint>

#include "runtime/config/config.h"

namespace annulus {

// What the benchmarks differ in. Each gives dim and ffn.
struct SmallLlama {
  int64_t layers = 4, dim, heads = 4, kv_heads = 2, ffn;
  int64_t context = 1024, batch = 1;
  int64_t steps = 0;
  int64_t text_bytes = 1 << 20;
};

inline Config config_of(const SmallLlama& llama) {
  Config config;
  config.device = "cpu";
  config.run.steps = llama.steps;
  config.data.train = {"python-sources"};
  config.data.max_bytes = llama.text_bytes;
  config.data.context = llama.context;
  config.data.batch = llama.batch;
  config.model.layers = llama.layers;
  config.model.dim = llama.dim;
  config.model.heads = llama.heads;
  config.model.kv_heads = llama.kv_heads;
  config.model.ffn = llama.ffn;
  config.optimizer.lr = 1e-4;
  return config;
}

}  // namespace annulus
