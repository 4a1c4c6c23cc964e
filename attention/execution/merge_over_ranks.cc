// See merge_over_ranks.h.
#include "attention/execution/merge_over_ranks.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "attention/tiles/merge.h"

namespace annulus {

PartialAttention merge_over_ranks(Communicator& comm, const PartialAttention& own, OpLabel label) {
  if (comm.size() == 1) return own;
  const int64_t values = own.out.numel(), all = values + own.lse.numel();
  const at::Tensor packed = at::cat({own.out.reshape({-1}), own.lse.reshape({-1})});
  at::Tensor gathered = at::empty({comm.size(), all}, packed.options());
  comm.all_gather(gathered, packed, label);
  PartialAttention merged{at::empty(own.out.sizes(), packed.options()), at::empty(own.lse.sizes(), packed.options())};
  const auto heads_first = [](const at::Tensor& out) { return out.transpose(1, 2); };
  for (int64_t first = 0; first < comm.size(); first += static_cast<int64_t>(kMostParts)) {
    std::vector<MergePart> parts;
    for (int64_t r = first; r < std::min<int64_t>(comm.size(), first + static_cast<int64_t>(kMostParts)); ++r) {
      parts.emplace_back(heads_first(gathered[r].narrow(0, 0, values).view(own.out.sizes())),
                         gathered[r].narrow(0, values, all - values).view(own.lse.sizes()), 0);
    }
    const at::Tensor out = heads_first(merged.out);
    merge_parts(out, merged.lse, first == 0 ? at::Tensor() : out, first == 0 ? at::Tensor() : merged.lse, parts);
  }
  return merged;
}

}  // namespace annulus
