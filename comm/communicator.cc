// See communicator.h.
#include "comm/communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace annulus {

std::vector<std::string> all_gather_text(Communicator& comm, std::string_view text, OpLabel label) {
  Communicator& host = comm.host();
  at::Tensor length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(text.size());
  at::Tensor lengths = at::empty({host.size(), 1}, at::kLong);
  host.all_gather(lengths, length, label);
  const int64_t* length_of = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(length_of, length_of + host.size());
  std::vector<std::string> out(static_cast<size_t>(host.size()));
  if (longest == 0) return out;
  at::Tensor mine = at::zeros({longest}, at::kByte);
  if (!text.empty()) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  at::Tensor all = at::empty({host.size(), longest}, at::kByte);
  host.all_gather(all, mine, label);
  const char* data = static_cast<const char*>(all.const_data_ptr());
  for (int r = 0; r < host.size(); ++r) {
    out[static_cast<size_t>(r)].assign(data + r * longest, static_cast<size_t>(length_of[r]));
  }
  return out;
}

}  // namespace annulus
