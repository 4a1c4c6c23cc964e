// See parameter_groups.h.
#include "runtime/training/state/parameter_groups.h"

#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <string>

#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

bool matches(const ParameterGroup& group, const std::string& name) {
  return fnmatch(group.match.c_str(), name.c_str(), 0) == 0;
}

// Returns "model.layers.*.mlp.up_proj.weight" for "model.layers.7.mlp.up_proj.weight", which gives few names for any
// number of layers.
std::string of_all_layers(const std::string& name) {
  std::string general;
  for (const char c : name) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) {
      general += c;
    } else if (general.empty() || general.back() == '.') {
      general += '*';
    } else if (general.back() != '*') {
      general += c;
    }
  }
  return general;
}

[[noreturn]] void refuse(const Parameters& parameters, const ParameterGroups& groups, size_t which) {
  const ParameterGroup& group = groups.list[which];
  std::vector<std::string> names;
  bool any = false;
  for (const ParameterInfo& p : parameters.list()) {
    any = any || matches(group, p.name);
    const std::string name = of_all_layers(p.name);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  const std::string near = nearest(group.match, names);
  throw Error(ErrorKind::kUsage, "train",
              "optimizer.groups[" + std::to_string(which) + "]: match = " + toml_string(group.match) +
                  (any ? " matches only parameters that earlier groups match, and only the first match counts: "
                         "remove this group, or put it before them"
                   : near.empty() ? " matches no parameter; there are " + join(names, ", ")
                                  : " matches no parameter; did you mean " + toml_string(near) + "?"));
}

}  // namespace

std::vector<Rates> parameter_rates(const Parameters& parameters, double weight_decay, const ParameterGroups& groups) {
  std::vector<Rates> rates;
  std::vector<bool> followed(groups.list.size());
  for (const ParameterInfo& p : parameters.list()) {
    Rates of{.lr = 1, .weight_decay = p.offset < parameters.units()[p.unit].decayed ? weight_decay : 0};
    for (size_t i = 0; i < groups.list.size(); ++i) {
      const ParameterGroup& group = groups.list[i];
      if (!matches(group, p.name)) continue;
      of = {.lr = group.lr, .weight_decay = group.weight_decay.value_or(of.weight_decay)};
      followed[i] = true;
      break;
    }
    rates.push_back(of);
  }
  for (size_t i = 0; i < followed.size(); ++i) {
    if (!followed[i]) refuse(parameters, groups, i);
  }
  return rates;
}

std::vector<RatedRange> rated_ranges(const Parameters& parameters, const std::vector<Rates>& rates,
                                     const UnitRange& of) {
  const ParameterUnit& unit = parameters.units()[of.unit];
  std::vector<RatedRange> ranges;
  for (size_t i = unit.first; i < unit.last; ++i) {
    const int64_t end = i + 1 < unit.last ? parameters.list()[i + 1].offset : unit.elements;
    const int64_t first = std::max(of.begin, parameters.list()[i].offset), last = std::min(of.end, end);
    if (first >= last) continue;
    if (!ranges.empty() && ranges.back().rates == rates[i]) {
      ranges.back().end = last - of.begin;
    } else {
      ranges.push_back({first - of.begin, last - of.begin, rates[i]});
    }
  }
  return ranges;
}

}  // namespace annulus
