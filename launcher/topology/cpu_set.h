// CpuSet: a set of logical processors (PUs) by the operating system's numbers. Machine and Placement hold such sets,
// bind_to_cpus passes them to the kernel, and the launcher prints them.
//
// Thread safety: a plain value; concurrent reads are safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

class CpuSet {
 public:
  // The largest processor number accepted anywhere. It is far above any machine's, and small enough that a malformed
  // list cannot make this process allocate much memory.
  static constexpr int kMaxPu = 65535;

  CpuSet() = default;
  // Takes numbers in any order; duplicates are allowed. Throws Error(kInput) for numbers outside [0, kMaxPu].
  explicit CpuSet(std::vector<int> pus);

  // Reads the kernel's list format, "0-3,8"; "" is the empty set. Throws Error(kInput) for anything else.
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
