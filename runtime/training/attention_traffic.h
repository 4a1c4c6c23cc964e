// Computes what a rank sends in a training step for attention: keys and values, and their gradients. The numbers are
// those of the programs that the step runs, which the memory plan has cached. Used by fitting.cc. Thread safety: a
// function without state.
#pragma once

#include <vector>

#include "runtime/config/config.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

// Bytes that leave a rank in a step, over all layers and all batches that the step accumulates.
struct AttentionTraffic {
  double keys_and_values = 0;  // of forward and backward, in the dtype that the model computes in
  double gradients = 0;        // of keys and values, in the backward, in the dtype of sums
  double queries = 0;          // queries and results of schedules that move them, with what belongs to them

  double total() const { return keys_and_values + gradients + queries; }
};

// For rank `rank` of the context axis. `stages` is the result of training_stages() for its ranks; of several stages the
// one in which the most is sent counts. Documents of the data are not considered: a step with documents that end within
// a row sends at most as much. Nothing is counted for layers whose pattern selects its blocks at run time.
AttentionTraffic attention_traffic(const Config& config, const std::vector<Stage>& stages, int rank);

}  // namespace annulus
