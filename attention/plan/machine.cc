// The arithmetic of machines, and how they are found by name; see machine.h.
#include "attention/plan/machine.h"

#include <algorithm>

#include "attention/plan/built_in_machines.h"
#include "common/error.h"
#include "common/files.h"
#include "common/names.h"

namespace annulus {
namespace {

// Where a length lies among ascending ones: between those of `at` and `at` + 1, at `share` of the way in 1 / length.
struct Place {
  size_t at = 0;
  double share = 0;
};

Place place_of(const std::vector<int64_t>& points, int64_t length) {
  if (points.size() < 2 || length <= points.front()) return {};
  if (length >= points.back()) return {points.size() - 2, 1};
  const auto above = std::upper_bound(points.begin(), points.end(), length);
  const double low = 1 / static_cast<double>(*(above - 1)), high = 1 / static_cast<double>(*above);
  return {static_cast<size_t>(above - points.begin()) - 1, (low - 1 / static_cast<double>(length)) / (low - high)};
}

KernelRate scaled(KernelRate rate, double factor) {
  for (auto& row : rate.rates) {
    for (double& value : row) value *= factor;
  }
  return rate;
}

KernelRates scaled(const KernelRates& rates, double factor) {
  return factor == 1 ? rates : KernelRates{scaled(rates.forward, factor), scaled(rates.backward, factor)};
}

}  // namespace

double KernelRate::rate(int64_t tile_rows, int64_t tile_keys) const {
  const Place r = place_of(rows, tile_rows), k = place_of(keys, tile_keys);
  const auto between = [](const Place& place, auto value) {
    if (place.share == 0 || place.share == 1) return value(place.at + (place.share == 1 ? 1 : 0));
    return (1 - place.share) * value(place.at) + place.share * value(place.at + 1);
  };
  return 1 / between(r, [&](size_t i) { return between(k, [&](size_t j) { return 1 / rates[i][j]; }); });
}

KernelRates MachineProfile::kernel(int64_t element_bytes) const {
  struct Known {
    const std::optional<KernelRates>& rates;
    double bytes;
  };
  const Known known[] = {{bf16, 2}, {fp32, 4}, {fp64, 8}};
  const int wanted = element_bytes >= 8 ? 2 : element_bytes >= 4 ? 1 : 0;
  for (int i = wanted; i >= 0; --i) {
    if (known[i].rates) return scaled(*known[i].rates, known[i].bytes / known[wanted].bytes);
  }
  for (int i = wanted + 1; i < 3; ++i) {
    if (known[i].rates) return scaled(*known[i].rates, known[i].bytes / known[wanted].bytes);
  }
  throw Error(ErrorKind::kInternal, "machine", "the machine \"" + name + "\" has no rates of kernels");
}

const std::vector<std::string>& built_in_machines() {
  static const std::vector<std::string> names = names_of(built_in_machine_texts());
  return names;
}

MachineProfile built_in_machine(std::string_view name) {
  const size_t index = index_of_name(name, built_in_machines(), "machine", "machine");
  const BuiltInMachine& machine = built_in_machine_texts()[index];
  return parse_machine(machine.toml, "configs/machines/" + std::string(machine.name) + ".toml");
}

MachineProfile find_machine(const std::string& name, std::string_view where, std::string_view device) {
  if (name.empty()) return built_in_machine(device == "cuda" ? "h100" : "cpu");
  const auto& known = built_in_machines();
  if (std::find(known.begin(), known.end(), name) != known.end()) return built_in_machine(name);
  if (name.find('/') == std::string::npos && !name.ends_with(".toml")) {
    throw Error(ErrorKind::kUsage, "machine",
                std::string(where) + ": unknown machine \"" + name + "\"" + suggestion(name, known) +
                    "; or give the path of a profile, as `annulus bench calibrate --out machine.toml` writes one");
  }
  return parse_machine(read_small_file("machine", name), name);
}

}  // namespace annulus
