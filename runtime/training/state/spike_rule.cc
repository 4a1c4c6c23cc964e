// See spike_rule.h.
#include "runtime/training/state/spike_rule.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "common/error.h"

namespace annulus {

std::optional<double> SpikeRule::median() const {
  if (factor_ == 0 || norms_.size() < window_) return std::nullopt;
  std::vector<double> sorted(norms_.begin(), norms_.end());
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

bool SpikeRule::is_spike(double norm) const {
  const std::optional<double> usual = median();
  return usual && norm > factor_ * *usual;
}

void SpikeRule::applied(double norm) {
  if (factor_ == 0) return;
  norms_.push_back(norm);
  if (norms_.size() > window_) norms_.pop_front();
}

std::string SpikeRule::text() const {
  if (factor_ == 0) return "";
  return nlohmann::json{{"norms", norms_}, {"spikes", spikes_}}.dump();
}

void SpikeRule::restore(const std::string& text) {
  std::deque<double> norms;
  int64_t spikes = 0;
  try {
    if (!text.empty()) {
      const nlohmann::json from = nlohmann::json::parse(text);
      norms = from.at("norms").get<std::deque<double>>();
      spikes = from.at("spikes").get<int64_t>();
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::kInput, "checkpoint",
                "the checkpoint's record of gradient norms is damaged: " + std::string(error.what()));
  }
  if (!std::all_of(norms.begin(), norms.end(), [](double norm) { return std::isfinite(norm) && norm >= 0; })) {
    throw Error(ErrorKind::kInput, "checkpoint",
                "the checkpoint's record of gradient norms is damaged: a norm is negative or not finite");
  }
  while (norms.size() > window_) norms.pop_front();
  norms_ = std::move(norms);
  spikes_ = spikes;
}

}  // namespace annulus
