// Which ranks of a communicator share a host, and the two levels that sums and gathers over several hosts have. The
// communicator keeps it (Communicator::hosts); backends that carry collectives themselves go by it (rounds.h,
// rank_order.h), and so do memory plans, of worlds that are not there.
//
// Over several hosts, of which each has neighbouring ranks and one has more than one, a sum is made inside each host
// first and then between hosts, host by host: its order depends on nothing but the numbers of ranks on each. What
// belongs to rank r travels between its host and another once, to and from the carrier there: the rank that has the
// same place in its host as r has in its own, counted round where that host has fewer ranks. So every rank carries its
// part, and a host has as many streams to another as it has ranks.
//
// Thread safety: plain data.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Consecutive ranks in groups.
class RankGroups {
 public:
  explicit RankGroups(const std::vector<int>& sizes);

  int count() const { return static_cast<int>(begins_.size()) - 1; }
  int ranks() const { return begins_.back(); }
  int first(int group) const { return begins_[static_cast<size_t>(group)]; }
  int size(int group) const { return first(group + 1) - first(group); }
  int of(int rank) const;
  // Who sends and receives for `group` what belongs to `rank`: the rank itself where it is one of the group.
  int carrier(int group, int rank) const;
  // The ranks whose parts `rank` carries for its group, its own among them, in order.
  std::vector<int> carried_by(int rank) const;
  std::vector<int> sizes() const;

 private:
  std::vector<int> begins_;  // of each group; the number of ranks
};

class RankHosts {
 public:
  // All on one.
  explicit RankHosts(int ranks) : RankHosts(std::vector<int>(static_cast<size_t>(ranks), 0)) {}
  // of[r] is the host of rank r, under any number: hosts are counted anew, in the order of their lowest ranks.
  explicit RankHosts(const std::vector<int>& of);
  // Each host has `a_host`, the last one what is left.
  static RankHosts filled(int ranks, int a_host);

  int ranks() const { return static_cast<int>(of_.size()); }
  int count() const { return count_; }
  int of(int rank) const { return of_[static_cast<size_t>(rank)]; }
  // How sums go: the ranks of each host, or one group of all ranks where there is one host, where each has one rank,
  // and where the ranks of a host are no neighbours.
  const RankGroups& groups() const { return groups_; }

 private:
  std::vector<int> of_;
  int count_;
  RankGroups groups_;
};

// Of the host that this process runs on; "unknown" where the system does not say.
std::string host_name();
// What tells this process's host from all others: its name and its kernel's start.
std::string host_identity();
// hosts[r], a name of rank r's host, as numbers for RankHosts.
std::vector<int> numbered(const std::vector<std::string>& hosts);

}  // namespace annulus
