// The settings of an attention call beside its tensors, and make_call, which turns tensors and settings into a call
// that all ranks agree on. Used by autocast.cc, collectives.cc, operators.cc and reports.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "comm/agreement.h"
#include "comm/communicator.h"

namespace annulus::torch_ops {

// The arguments of attention beside its tensors, in the order of the operators' schemas.
struct Settings {
  std::string pattern, group, layout, schedule;
  std::optional<double> scale;  // 1 / sqrt(head size) if it is not given, or 0
  double dropout = 0;
  c10::SymInt seed, step;
  int64_t layer = 0;
  c10::SymInt first_row, query_offset;
};

// Use<...> with the types of Settings, for operators whose signatures list them as the schemas do.
template <template <typename...> class Use>
using WithSettings = Use<std::string, std::string, std::string, std::string, std::optional<double>, double, c10::SymInt,
                         c10::SymInt, int64_t, c10::SymInt, c10::SymInt>;

// Raises Error(kUsage) with this message unless `ok`.
void require(bool ok, const std::string& message);

// Checks shapes, dtypes, devices and layouts of the tensors that attention takes: q [batch, n, heads, head size], k and
// v [batch, m, kv heads, head size], cu_seqlens [documents + 1]. Raises Error(kUsage). Tensors on the device meta get
// no other check than this.
void require_tensors(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& cu_seqlens);

// The parsed pattern of a text, from a cache, because users pass the same text at every call. Raises Error(kUsage).
std::shared_ptr<const PatternSpec> pattern_of(const std::string& text);

// The pattern of a text for one shape, with the documents that cu_seqlens delimits and with block maps read from files.
PatternSpec pattern_for(const std::string& text, const std::optional<at::Tensor>& cu_seqlens,
                        const AttentionShape& shape);

// Sets the length of each rank's part of the sequence in the request. Raises Error(kUsage) if there is not one length
// for each rank or their sum is wrong, Error(kPlan) if the layout cannot have such parts.
void place_parts(PlanRequest& request, const std::vector<int64_t>& lengths);

// The number of a call from the tensor in which its forward returned it, int64 without dimensions. Raises Error(kUsage)
// for another tensor.
int64_t number_of(const at::Tensor& number);

// A forward or a backward, for make_call.
struct Direction {
  // Checks what only this direction is given, and returns what must be the same on all ranks, such as {"call",
  // "forward"}. Called after the checks of q, k, v and the settings.
  std::function<std::vector<Field>()> terms;
  // Whether this rank has a gradient of lse; make_call sets it to whether any rank has one.
  bool lse_gradient = false;
};

// The attention call of all ranks of `comm`, the communicator of the settings' group. Collective: an error on one rank,
// or a difference between ranks, is raised on all of them. `keep_last` says whether this rank can keep the keys and
// values that it holds last for its backward; the plan keeps them if all ranks can.
AttentionCall make_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::optional<at::Tensor>& cu_seqlens, const Settings& settings, bool keep_last,
                        Direction& direction, Communicator& comm);

}  // namespace annulus::torch_ops
