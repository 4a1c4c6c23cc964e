// CpuSet: a set of logical processors (PUs) by the kernel's numbers. Used by Machine, Placement, bind_to_cpus and the
// launcher.
//
// Thread safety: a plain value; concurrent reads are safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

class CpuSet {
 public:
  // The largest processor number accepted: far above any machine's, but small enough that a malformed list cannot
  // exhaust memory.
  static constexpr int kMaxPu = 65535;

  CpuSet() = default;
  // Takes numbers in any order, with duplicates. Raises Error(kInput) for numbers outside [0, kMaxPu].
  explicit CpuSet(std::vector<int> pus);

  // Parses the kernel's list format, "0-3,8"; "" is the empty set. Raises Error(kInput) for anything else.
  static CpuSet parse(std::string_view list);
  std::string to_string() const;

  const std::vector<int>& pus() const { return pus_; }  // ascending, distinct
  bool empty() const { return pus_.empty(); }
  int size() const { return static_cast<int>(pus_.size()); }
  bool contains(int pu) const;
  bool contains(const CpuSet& other) const;

  bool operator==(const CpuSet&) const = default;

 private:
  std::vector<int> pus_;
};

}  // namespace annulus
