// Property tests of launcher/topology/placement.h: how many ranks each of several hosts gets. Compiled with
// placement_property_test.cc.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "launcher/topology/placement.h"

namespace annulus::placement_totals_test {
namespace {

// A total is divided evenly: no host has two ranks more than a host that has room for another.
RC_GTEST_PROP(PlacementTotals, TotalsAreDividedEvenly, ()) {
  std::vector<Machine> hosts;
  int gpus = 0;
  for (int h = *rc::gen::inRange(1, 6); h > 0; --h) {
    std::vector<std::string> ids;
    for (int g = *rc::gen::inRange(0, 10); g > 0; --g) ids.push_back(std::to_string(g) + ":00.0");
    hosts.push_back(Machine::from_synthetic("pack:2 [numa] core:4 pu:1"));
    hosts.back().set_visible_gpus(ids);
    gpus += static_cast<int>(ids.size());
  }
  RC_PRE(gpus > 0);
  const int ranks = *rc::gen::inRange(1, gpus + 1);
  const Placement p = place(hosts, ranks, {DeviceKind::kCuda});
  std::vector<int> counts(hosts.size(), 0);
  for (const RankPlacement& rank : p.ranks) ++counts[static_cast<size_t>(rank.host_index)];
  const int most = *std::max_element(counts.begin(), counts.end());
  for (size_t h = 0; h < hosts.size(); ++h) {
    RC_ASSERT(counts[h] >= most - 1 || counts[h] == static_cast<int>(hosts[h].gpus.size()));
  }
  RC_ASSERT(static_cast<int>(p.ranks.size()) == ranks);
}

}  // namespace
}  // namespace annulus::placement_totals_test
