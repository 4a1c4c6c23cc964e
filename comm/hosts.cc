// See hosts.h.
#include "comm/hosts.h"

#include <unistd.h>

#include <algorithm>

#include "common/files.h"

namespace annulus {
namespace {

std::vector<int> counted_anew(const std::vector<int>& of) {
  std::vector<int> seen, out;
  for (const int host : of) {
    const auto found = std::find(seen.begin(), seen.end(), host);
    out.push_back(static_cast<int>(found - seen.begin()));
    if (found == seen.end()) seen.push_back(host);
  }
  return out;
}

// The sizes of RankHosts::groups().
std::vector<int> sizes_of_groups(const std::vector<int>& of, int hosts) {
  const std::vector<int> all{static_cast<int>(of.size())};
  if (hosts < 2 || hosts == all[0] || !std::is_sorted(of.begin(), of.end())) return all;
  std::vector<int> sizes(static_cast<size_t>(hosts), 0);
  for (const int host : of) ++sizes[static_cast<size_t>(host)];
  return sizes;
}

}  // namespace

RankGroups::RankGroups(const std::vector<int>& sizes) : begins_{0} {
  for (const int size : sizes) begins_.push_back(begins_.back() + size);
}

int RankGroups::of(int rank) const {
  return static_cast<int>(std::upper_bound(begins_.begin(), begins_.end(), rank) - begins_.begin()) - 1;
}

int RankGroups::carrier(int group, int rank) const {
  const int own = of(rank);
  return own == group ? rank : first(group) + (rank - first(own)) % size(group);
}

std::vector<int> RankGroups::carried_by(int rank) const {
  const int own = of(rank), place = rank - first(own);
  std::vector<int> carried;
  for (int group = 0; group < count(); ++group) {
    if (group == own) carried.push_back(rank);
    for (int r = first(group) + place; group != own && r < first(group + 1); r += size(own)) carried.push_back(r);
  }
  return carried;
}

std::vector<int> RankGroups::sizes() const {
  std::vector<int> sizes;
  for (int group = 0; group < count(); ++group) sizes.push_back(size(group));
  return sizes;
}

RankHosts::RankHosts(const std::vector<int>& of)
    : of_(counted_anew(of)),
      count_(of_.empty() ? 0 : *std::max_element(of_.begin(), of_.end()) + 1),
      groups_(sizes_of_groups(of_, count_)) {}

RankHosts RankHosts::filled(int ranks, int a_host) {
  std::vector<int> of;
  for (int rank = 0; rank < ranks; ++rank) of.push_back(rank / a_host);
  return RankHosts(of);
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

std::string host_identity() { return host_name() + " " + first_line("/proc/sys/kernel/random/boot_id"); }

std::vector<int> numbered(const std::vector<std::string>& hosts) {
  std::vector<int> of;
  for (const std::string& host : hosts) {
    of.push_back(static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin()));
  }
  return of;
}

}  // namespace annulus
