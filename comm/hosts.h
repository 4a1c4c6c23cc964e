// Which ranks of a communicator share a host, and the two levels of sums and gathers over several hosts. The
// communicator keeps this (Communicator::hosts). Backends that carry collectives themselves use it (rounds.h,
// rank_order.h), and so does the memory plan for jobs that are not running.
//
// If there are several hosts, the ranks of each are consecutive, and at least one host has several ranks, a sum is made
// inside each host first and then between hosts, host by host. Its order depends only on the number of ranks on each
// host. The data of rank r travel between its host and another host once, to and from the carrier there. The carrier is
// the rank with the same place on its host as r has on its own, modulo the number of ranks of that host. So every rank
// carries its part, and a host has as many connections to another host as it has ranks.
//
// Example: ranks 0-2 are on one host and 3-4 on another. Places are 0, 1, 2 and 0, 1. The carriers of ranks 0, 1 and 2
// on the second host are ranks 3, 4 and 3; the carriers of ranks 3 and 4 on the first host are ranks 0 and 1. Rank 3
// carries the data of ranks 0, 2 and 3 for its host.
//
// Thread safety: plain data, and functions without state.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Ranks 0, 1, ... divided into groups of consecutive ranks.
class RankGroups {
 public:
  // sizes: the number of ranks of each group, in order.
  explicit RankGroups(const std::vector<int>& sizes);

  int count() const { return static_cast<int>(begins_.size()) - 1; }
  int ranks() const { return begins_.back(); }
  int first(int group) const { return begins_[static_cast<size_t>(group)]; }
  int size(int group) const { return first(group + 1) - first(group); }
  int of(int rank) const;
  // The rank of `group` that sends and receives the data of `rank`: `rank` itself if it belongs to the group.
  int carrier(int group, int rank) const;
  // The ranks whose data `rank` carries for its group, in ascending order. `rank` itself is among them.
  std::vector<int> carried_by(int rank) const;
  std::vector<int> sizes() const;

 private:
  std::vector<int> begins_;  // the first rank of each group, and at the end the number of ranks
};

class RankHosts {
 public:
  // All ranks are on one host.
  explicit RankHosts(int ranks) : RankHosts(std::vector<int>(static_cast<size_t>(ranks), 0)) {}
  // of[r] is the host of rank r, under any number. Hosts are renumbered from 0 in the order of their lowest ranks.
  explicit RankHosts(const std::vector<int>& of);
  // Each host has `a_host` ranks, except the last, which has the remaining ones.
  static RankHosts filled(int ranks, int a_host);

  int ranks() const { return static_cast<int>(of_.size()); }
  int count() const { return count_; }
  int of(int rank) const { return of_[static_cast<size_t>(rank)]; }
  // The hosts of the first `ranks` ranks alone.
  RankHosts first(int ranks) const { return RankHosts(std::vector<int>(of_.begin(), of_.begin() + ranks)); }
  // The groups in which sums are made: one for each host, or one group of all ranks if there is only one host, if each
  // host has one rank, or if the ranks of a host are not consecutive.
  const RankGroups& groups() const { return groups_; }

 private:
  std::vector<int> of_;
  int count_;
  RankGroups groups_;
};

// The name of the host that this process runs on; "unknown" if the system has none.
std::string host_name();
// A text that differs from that of every other host: the host's name and the boot id of its kernel.
std::string host_identity();
// Converts names of hosts to numbers for RankHosts. hosts[r] is the name of rank r's host.
std::vector<int> numbered(const std::vector<std::string>& hosts);

}  // namespace annulus
