// What a call of attention is given beside its tensors, and how it becomes a call that all ranks mean alike. Used by
// the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "comm/communicator.h"

namespace annulus::torch_ops {

// In the order of the operators' schemas (WithSettings).
struct Settings {
  std::string pattern, group, layout, schedule;
  double scale = 0, dropout = 0;
  c10::SymInt seed, step;
  int64_t layer = 0;
  c10::SymInt first_row, query_offset;
};

// Use<...> of the types of Settings: signatures of operators have them as they stand in the schemas.
template <template <typename...> class Use>
using WithSettings = Use<std::string, std::string, std::string, std::string, double, double, c10::SymInt, c10::SymInt,
                         int64_t, c10::SymInt, c10::SymInt>;

// Error(kUsage) of this room.
void require(bool ok, const std::string& message);

// What holds for the tensors that attention takes, whether they have content or are shapes alone: of tensors on meta,
// nothing else is ever looked at, and where one of them is there, nothing is computed.
void require_tensors(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& cu_seqlens);

// Of a pattern's text: users pass the same one at every call.
std::shared_ptr<const PatternSpec> pattern_of(const std::string& text);

// The pattern of a text and of the documents that cu_seqlens delimits, with the block maps of files, for one shape.
PatternSpec pattern_for(const std::string& text, const std::optional<at::Tensor>& cu_seqlens,
                        const AttentionShape& shape);

// Sets the lengths of the ranks' parts of the request's ranks. Error(kPlan) where its layout does not deal such.
void place_parts(PlanRequest& request, const std::vector<int64_t>& lengths);

// The call of all ranks of `comm`, which is that of the settings' group. Collective: what is wrong on one rank, or not
// the same on all, is raised on all of them. `direction`: "forward" or "backward"; ranks that are not in the same one
// are told. keep_last: this rank can keep what it holds last for its backward; a plan keeps it where all ranks can.
AttentionCall make_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::optional<at::Tensor>& cu_seqlens, const Settings& settings, bool keep_last,
                        const char* direction, Communicator& comm);

}  // namespace annulus::torch_ops
