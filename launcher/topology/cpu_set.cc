// See cpu_set.h.
#include "launcher/topology/cpu_set.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "common/error.h"

namespace annulus {

CpuSet::CpuSet(std::vector<int> pus) : pus_(std::move(pus)) {
  std::sort(pus_.begin(), pus_.end());
  pus_.erase(std::unique(pus_.begin(), pus_.end()), pus_.end());
  if (!pus_.empty() && (pus_.front() < 0 || pus_.back() > kMaxPu)) {
    throw Error(ErrorKind::kInput, "topology",
                "processor numbers must lie in 0-" + std::to_string(kMaxPu) + ", got " +
                    std::to_string(pus_.front() < 0 ? pus_.front() : pus_.back()));
  }
}

CpuSet CpuSet::parse(std::string_view list) {
  const auto fail = [&](const std::string& why) {
    throw Error(
        ErrorKind::kInput, "topology",
        "expected a list of processors such as \"0-3,8\", got \"" + std::string(list.substr(0, 80)) + "\": " + why);
  };
  std::vector<int> pus;
  std::string_view rest = list;
  while (!rest.empty()) {
    const auto number = [&]() {
      int value = 0;
      const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
      if (error != std::errc() || value < 0 || value > kMaxPu) {
        fail("expected a number in 0-" + std::to_string(kMaxPu));
      }
      rest.remove_prefix(end - rest.data());
      return value;
    };
    const int first = number();
    int last = first;
    if (!rest.empty() && rest.front() == '-') {
      rest.remove_prefix(1);
      last = number();
      if (last < first) fail("a range ends before it begins");
    }
    // This bounds the memory that a long list of overlapping ranges can take.
    if (pus.size() + static_cast<size_t>(last - first) > 4 * static_cast<size_t>(kMaxPu)) fail("too many processors");
    for (int pu = first; pu <= last; ++pu) pus.push_back(pu);
    if (rest.empty()) break;
    if (rest.front() != ',') fail("expected a comma");
    rest.remove_prefix(1);
    if (rest.empty()) fail("it ends with a comma");
  }
  return CpuSet(std::move(pus));
}

std::string CpuSet::to_string() const {
  std::string out;
  for (size_t i = 0; i < pus_.size();) {
    size_t j = i;
    while (j + 1 < pus_.size() && pus_[j + 1] == pus_[j] + 1) ++j;
    if (!out.empty()) out += ',';
    out += std::to_string(pus_[i]);
    if (j > i) out += '-' + std::to_string(pus_[j]);
    i = j + 1;
  }
  return out;
}

bool CpuSet::contains(int pu) const { return std::binary_search(pus_.begin(), pus_.end(), pu); }

bool CpuSet::contains(const CpuSet& other) const {
  return std::includes(pus_.begin(), pus_.end(), other.pus_.begin(), other.pus_.end());
}

}  // namespace annulus
