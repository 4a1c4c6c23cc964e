// Gathers a distributed tensor on rank 0; see gather_positions.h.
#include "attention/execution/gather_positions.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <vector>

namespace annulus {

at::Tensor gather_positions(Communicator& host, const at::Tensor& part, const Layout& layout, int64_t dim,
                            OpLabel label) {
  const at::Tensor mine = part.cpu();
  if (host.size() == 1) return mine;  // in every layout a single rank has all positions in order
  if (host.rank() != 0) {
    host.exchange({{mine.contiguous(), 0}}, {}, label)->wait();
    return {};
  }
  std::vector<int64_t> shape = mine.sizes().vec();
  shape[static_cast<size_t>(dim)] = layout.length;
  at::Tensor whole = at::empty(shape, mine.options());
  for (int rank = 0; rank < host.size(); ++rank) {
    std::vector<int64_t> positions = layout.positions(rank);
    at::Tensor piece = mine;
    if (rank != 0) {
      shape[static_cast<size_t>(dim)] = static_cast<int64_t>(positions.size());
      piece = at::empty(shape, mine.options());
      host.exchange({}, {{piece, rank}}, label)->wait();
    }
    const at::Tensor index =
        at::from_blob(positions.data(), {static_cast<int64_t>(positions.size())}, at::ScalarType::Long);
    whole.index_copy_(dim, index, piece);
  }
  return whole;
}

}  // namespace annulus
