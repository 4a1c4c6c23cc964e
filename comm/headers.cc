// See headers.h.
#include "comm/headers.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "comm/checks.h"
#include "common/text.h"

namespace annulus::comm_internal {

const char* collective_name(int8_t collective) {
  switch (static_cast<Collective>(collective)) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kSplit:
      return "split";
  }
  return "unknown";
}

namespace {

const char* reduce_name(int8_t op) {
  switch (op) {
    case static_cast<int8_t>(ReduceOp::kSum):
      return "sum";
    case static_cast<int8_t>(ReduceOp::kMax):
      return "max";
    case static_cast<int8_t>(ReduceOp::kMin):
      return "min";
    default:
      return "none";
  }
}

}  // namespace

CollectiveHeader make_header(Collective collective, int64_t call, const at::Tensor* tensor, int reduce_op, int root,
                             OpLabel label) {
  CollectiveHeader header;
  header.collective = static_cast<int8_t>(collective);
  header.call = call;
  header.number = label.number;
  header.reduce_op = static_cast<int8_t>(reduce_op);
  header.root = root;
  if (tensor != nullptr) {
    header.dtype = static_cast<int8_t>(tensor->scalar_type());
    const at::IntArrayRef shape = tensor->sizes();
    const int64_t folded = std::max<int64_t>(0, tensor->dim() - CollectiveHeader::kMaxDims);
    header.dims = static_cast<int8_t>(tensor->dim() - folded);
    for (int64_t i = 0; i < header.dims; ++i) header.shape[i] = shape[i + folded];
    for (int64_t i = 0; i < folded; ++i) header.shape[0] *= shape[i];
  }
  const size_t length = std::min<size_t>(label.operation.size(), CollectiveHeader::kLabelBytes - 1);
  std::memcpy(header.label, label.operation.data(), length);
  return header;
}

std::string describe_disagreement(const Communicator& comm, const std::vector<CollectiveHeader>& headers,
                                  std::string_view counted) {
  const CollectiveHeader& first = headers.front();
  const bool same = std::all_of(headers.begin(), headers.end(), [&](const CollectiveHeader& header) {
    return std::memcmp(&header, &first, sizeof header) == 0;
  });
  if (same) return "";
  std::string differences;
  const auto compare = [&](const std::string& name, auto text) {
    std::vector<std::string> values;
    for (const CollectiveHeader& header : headers) values.push_back(text(header));
    if (std::all_of(values.begin(), values.end(), [&](const std::string& v) { return v == values.front(); })) return;
    differences += (differences.empty() ? "" : "; ") + name + " " + describe_difference(comm, values);
  };
  compare("collective", [](const CollectiveHeader& h) { return std::string(collective_name(h.collective)); });
  compare("operation", [](const CollectiveHeader& h) { return "\"" + std::string(h.label) + "\""; });
  compare(std::string(counted), [](const CollectiveHeader& h) { return std::to_string(h.number); });
  compare("number of the collective", [](const CollectiveHeader& h) { return std::to_string(h.call); });
  compare("dtype", [](const CollectiveHeader& h) {
    return h.dtype < 0 ? std::string("none") : dtype_name(static_cast<at::ScalarType>(h.dtype));
  });
  compare("shape", [](const CollectiveHeader& h) {
    const int dims = std::clamp<int>(h.dims, 0, CollectiveHeader::kMaxDims);
    return list_text(at::IntArrayRef(h.shape, static_cast<size_t>(dims)));
  });
  compare("reduction", [](const CollectiveHeader& h) { return std::string(reduce_name(h.reduce_op)); });
  compare("root", [](const CollectiveHeader& h) { return std::to_string(h.root); });
  return std::string("ranks disagree in ") + collective_name(first.collective) + ": " + differences;
}

void require_same_headers(const Communicator& comm, const std::vector<CollectiveHeader>& headers, OpLabel label) {
  const std::string differences = describe_disagreement(comm, headers, label.counted);
  if (!differences.empty()) throw_mismatch(label, differences);
}

}  // namespace annulus::comm_internal
