// The checks and words shared by the backends of comm/.
#include "comm/checks.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>

namespace annulus::comm_internal {
namespace {

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

std::string shorten(const std::string& text, size_t limit) {
  return text.size() <= limit ? text : text.substr(0, limit) + "...";
}

}  // namespace

std::string where(OpLabel label) {
  return std::string(label.operation.empty() ? "unnamed operation" : label.operation) + ", step " +
         std::to_string(label.step);
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (i > 0) out += ",";
    out += std::to_string(ranks[i]);
    if (j > i) out += "-" + std::to_string(ranks[j]);
    i = j + 1;
  }
  return out;
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "fp32";
    case at::kDouble:
      return "fp64";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kByte:
      return "uint8";
    default:
      return c10::toString(dtype);
  }
}

std::string describe_shape(at::IntArrayRef shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? "," : "") + std::to_string(shape[i]);
  return out + "]";
}

std::string describe_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

void throw_comm(OpLabel label, const std::string& message) {
  throw Error(ErrorKind::kComm, "comm", where(label) + ": " + message);
}

void throw_mismatch(OpLabel label, const std::string& message) {
  throw Error(ErrorKind::kMismatch, "comm", where(label) + ": " + message);
}

void check_tensor(const at::Tensor& tensor, at::DeviceType device, std::string_view backend, const char* role,
                  OpLabel label) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kPlan, "comm",
                where(label) + ": the " + role + " " + why + " (backend " + std::string(backend) + ")");
  };
  if (!tensor.defined()) refuse("is undefined: expected a tensor");
  if (tensor.layout() != at::kStrided) refuse("is sparse: expected a dense tensor");
  if (tensor.device().type() != device) {
    refuse("is on " + tensor.device().str() + ": expected a tensor on " + c10::DeviceTypeName(device, true) +
           "; move it or use the backend of its device");
  }
  if (!tensor.is_contiguous()) {
    refuse("of shape " + describe_shape(tensor.sizes()) + " is not contiguous: pass tensor.contiguous()");
  }
  if (tensor.is_neg() || tensor.is_conj()) refuse("is a lazily negated or conjugated view: resolve it first");
}

void check_messages(const std::vector<Message>& sends, const std::vector<Message>& receives, int size,
                    at::DeviceType device, std::string_view backend, OpLabel label) {
  const auto check = [&](const Message& message, const char* role) {
    check_tensor(message.tensor, device, backend, role, label);
    if (message.peer < 0 || message.peer >= size) {
      throw Error(ErrorKind::kPlan, "comm",
                  where(label) + ": the " + role + " names peer " + std::to_string(message.peer) +
                      ": expected a rank from 0 to " + std::to_string(size - 1));
    }
  };
  for (const Message& message : sends) check(message, "send buffer");
  for (const Message& message : receives) check(message, "receive buffer");
}

void check_reducible(const at::Tensor& tensor, std::string_view backend, OpLabel label) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kLong) return;
  throw Error(ErrorKind::kPlan, "comm",
              where(label) + ": cannot reduce " + dtype_name(dtype) + " (backend " + std::string(backend) +
                  "): reductions take fp32, fp64 and int64, so that sums are exact to the accumulator; convert first");
}

void check_gather_shapes(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                         int size, OpLabel label) {
  std::vector<int64_t> expected{size};
  expected.insert(expected.end(), small.sizes().begin(), small.sizes().end());
  if (big.sizes() == at::IntArrayRef(expected) && big.scalar_type() == small.scalar_type()) return;
  throw Error(ErrorKind::kPlan, "comm",
              where(label) + ": " + big_role + " is " + dtype_name(big.scalar_type()) + " " +
                  describe_shape(big.sizes()) + ", expected " + dtype_name(small.scalar_type()) + " " +
                  describe_shape(expected) + ": [ranks, ..." + small_role + "]");
}

void check_root(int root, int size, OpLabel label) {
  if (root >= 0 && root < size) return;
  throw Error(
      ErrorKind::kPlan, "comm",
      where(label) + ": root " + std::to_string(root) + ": expected a rank from 0 to " + std::to_string(size - 1));
}

CollectiveHeader make_header(Collective collective, int64_t call, const at::Tensor* tensor, int reduce_op, int root,
                             OpLabel label) {
  CollectiveHeader header;
  header.collective = static_cast<int8_t>(collective);
  header.call = call;
  header.step = label.step;
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

std::string describe_difference(const std::vector<std::string>& values) {
  constexpr size_t kMaxGroups = 4;
  constexpr size_t kMaxText = 160;
  std::vector<std::string> distinct;
  for (const std::string& value : values) {
    if (std::find(distinct.begin(), distinct.end(), value) == distinct.end()) distinct.push_back(value);
  }
  std::string out = "is ";
  for (size_t i = 0; i < distinct.size(); ++i) {
    if (i == kMaxGroups) {
      out += " and " + std::to_string(distinct.size() - i) + " more values elsewhere";
      break;
    }
    std::vector<int> ranks;
    for (size_t r = 0; r < values.size(); ++r) {
      if (values[r] == distinct[i]) ranks.push_back(static_cast<int>(r));
    }
    out += (i ? ", " : "") + shorten(distinct[i], kMaxText) + " on " + describe_ranks(ranks);
  }
  return out;
}

void require_same_headers(const std::vector<CollectiveHeader>& headers, OpLabel label) {
  const CollectiveHeader& first = headers.front();
  const bool same = std::all_of(headers.begin(), headers.end(), [&](const CollectiveHeader& header) {
    return std::memcmp(&header, &first, sizeof header) == 0;
  });
  if (same) return;
  std::string differences;
  const auto compare = [&](const char* name, auto text) {
    std::vector<std::string> values;
    for (const CollectiveHeader& header : headers) values.push_back(text(header));
    if (std::all_of(values.begin(), values.end(), [&](const std::string& v) { return v == values.front(); })) return;
    differences += (differences.empty() ? "" : "; ") + std::string(name) + " " + describe_difference(values);
  };
  compare("collective", [](const CollectiveHeader& h) { return std::string(collective_name(h.collective)); });
  compare("operation", [](const CollectiveHeader& h) { return "\"" + std::string(h.label) + "\""; });
  compare("step", [](const CollectiveHeader& h) { return std::to_string(h.step); });
  compare("call number", [](const CollectiveHeader& h) { return std::to_string(h.call); });
  compare("dtype", [](const CollectiveHeader& h) {
    return h.dtype < 0 ? std::string("none") : dtype_name(static_cast<at::ScalarType>(h.dtype));
  });
  compare("shape", [](const CollectiveHeader& h) {
    const int dims = std::clamp<int>(h.dims, 0, CollectiveHeader::kMaxDims);
    return describe_shape(at::IntArrayRef(h.shape, static_cast<size_t>(dims)));
  });
  compare("reduction", [](const CollectiveHeader& h) { return std::string(reduce_name(h.reduce_op)); });
  compare("root", [](const CollectiveHeader& h) { return std::to_string(h.root); });
  throw_mismatch(label, std::string("ranks disagree in ") + collective_name(first.collective) + ": " + differences);
}

}  // namespace annulus::comm_internal
