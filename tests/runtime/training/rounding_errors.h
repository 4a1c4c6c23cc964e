// Measures how far training in fp32 or bf16 is from the same training in fp64, on the machine at hand. Tests hold what
// must not add errors (more ranks, a GPU) to a multiple of what is measured with one rank on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/tensor_files/model_dtypes.h"
#include "runtime/training/training.h"
#include "tests/common/exactness.h"
#include "tests/runtime/model/flat_parameters.h"

namespace annulus {

// What the first steps of a run compute.
struct FirstSteps {
  std::vector<double> losses;  // of the steps and of validation after them
  at::Tensor gradients;        // of the first step, of all weights: fp64, on the CPU
};

inline FirstSteps first_steps(const Config& config, Communicator& world, at::Device device) {
  constexpr int kSteps = 3;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  Training training(config, world, data, device);
  FirstSteps first;
  for (int i = 0; i < kSteps; ++i) {
    first.losses.push_back(training.step().loss);
    if (i > 0) continue;
    const std::vector<Updated>& updated = training.model_state().updated();
    first.gradients = flat(training.model().parameters().views([&](size_t unit) {
                        return updated[unit].gradients;
                      })).to(at::kCPU, at::kDouble);
  }
  first.losses.push_back(training.validate([] { return false; }).loss);
  return first;
}

// The root mean square of the relative errors of numbers.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& exact) {
  double squares = 0;
  for (size_t i = 0; i < exact.size(); ++i) squares += std::pow(got[i] / exact[i] - 1, 2);
  return std::sqrt(squares / static_cast<double>(exact.size()));
}

// The root mean square of the relative errors of losses, and that of the gradients (as norms of vectors). Both are
// taken over several seeds, so that no error is small by chance.
struct RoundingErrors {
  double losses = 0, gradients = 0;
};

// Trains as `run` does, once for each seed.
using RunFirstSteps = std::function<FirstSteps(const Config&)>;

inline std::vector<FirstSteps> with_each_seed(Config config, const RunFirstSteps& run) {
  constexpr int64_t kSeeds = 6;
  std::vector<FirstSteps> all;
  for (config.run.seed = 1; config.run.seed <= kSeeds; ++config.run.seed) all.push_back(run(config));
  return all;
}

inline RoundingErrors errors_of(const std::vector<FirstSteps>& got, const std::vector<FirstSteps>& exact) {
  double losses = 0, gradients = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    losses += std::pow(relative_error(got[i].losses, exact[i].losses), 2);
    gradients += std::pow(
        got[i].gradients.sub(exact[i].gradients).norm().item<double>() / exact[i].gradients.norm().item<double>(), 2);
  }
  const auto count = static_cast<double>(exact.size());
  return {std::sqrt(losses / count), std::sqrt(gradients / count)};
}

inline double roundoff(const std::string& dtype) { return testing::unit_roundoff(model_dtype(dtype, "model.dtype")); }

}  // namespace annulus
