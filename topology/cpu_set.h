// CpuSet: a set of logical processors (PUs), named as the operating system numbers them. Machine and Placement hold
// them, bind_this_process hands them to the kernel, the launcher prints them.
//
// Thread safety: as an int.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

class CpuSet {
 public:
  // The largest processor number accepted anywhere: far above any machine, small enough to be no way to ask for memory.
  static constexpr int kMaxPu = 65535;

  CpuSet() = default;
  // In any order, doubles allowed; numbers outside [0, kMaxPu] are Error(kInput).
  explicit CpuSet(std::vector<int> pus);

  // The kernel's list format, "0-3,8"; "" is the empty set. Anything else is Error(kInput).
  static CpuSet parse(std::string_view list);
  std::string to_string() const;

  const std::vector<int>& pus() const { return pus_; }  // ascending, each once
  bool empty() const { return pus_.empty(); }
  int size() const { return static_cast<int>(pus_.size()); }
  bool contains(int pu) const;
  bool contains(const CpuSet& other) const;

  bool operator==(const CpuSet&) const = default;

 private:
  std::vector<int> pus_;
};

}  // namespace annulus
