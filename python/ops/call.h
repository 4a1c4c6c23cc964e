// The settings of an attention call besides its tensors, and make_call, which makes an AttentionCall from both by
// agreement of all ranks. Used by autocast.cc, collectives.cc, operators.cc and reports.cc.
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

// The arguments of attention besides its tensors, in the order of the operators' schemas.
struct Settings {
  std::string pattern, group, layout, schedule;
  int64_t within = 0;
  std::optional<double> scale;  // nullopt or 0: 1 / sqrt(head size)
  double dropout = 0;
  c10::SymInt seed, step;
  int64_t layer = 0;
  c10::SymInt first_row, query_offset;
  double softcap = 0;
};

// Use<...> with the types of Settings, for operators whose signatures follow the schemas.
template <template <typename...> class Use>
using WithSettings = Use<std::string, std::string, std::string, std::string, int64_t, std::optional<double>, double,
                         c10::SymInt, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, double>;

// Raises Error(kUsage) with this message unless `ok`.
void require(bool ok, const std::string& message);

// Checks shapes, dtypes, devices and layouts of attention's tensors: q [batch, n, heads, head size], k and v [batch, m,
// kv heads, head size], cu_seqlens [documents + 1], sinks [heads]. Raises Error(kUsage). This is the only check of meta
// tensors.
void require_tensors(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& sinks);

// Sets the schedule of a request and the number of ranks of its inner groups. Raises Error(kUsage) for an unknown
// schedule and for a number that no plan has; planning raises Error(kPlan) if the number does not fit the ranks.
void set_schedule(PlanRequest& request, const std::string& schedule, int64_t within);

// Parses a pattern, cached, because users pass the same text in every call. Raises Error(kUsage).
std::shared_ptr<const PatternSpec> pattern_of(const std::string& text);

// Sets a request's layout from its name, or from "balanced by " or "per-document by " with the pattern by which it is
// dealt (PlanRequest::balance_by). Raises Error(kUsage) for another name, or a pattern that names a file.
void set_layout(PlanRequest& request, const std::string& text);

// Raises Error(kUsage) if the layout is dealt by a pattern and there is none.
void require_dealt(const PlanRequest& request);

// Returns the name of a layout with the pattern and the documents of cu_seqlens by which it is dealt, such as
// "balanced by ...". Raises as set_layout does.
std::string dealt_by(std::string layout, std::string pattern, std::optional<at::Tensor> cu_seqlens);

// Returns the pattern of a text with the documents of cu_seqlens, which are not compared with any length.
PatternSpec pattern_with(const std::string& text, const std::optional<at::Tensor>& cu_seqlens);

// Returns the pattern of a text for one shape, with the documents of cu_seqlens, with block maps and masks loaded from
// files, and with masks that Python has made. Those from files hold the bits in `held`, by default all.
PatternSpec pattern_for(const std::string& text, const std::optional<at::Tensor>& cu_seqlens,
                        const AttentionShape& shape, const HeldBits& held = HeldBits::everything());

// Sets the length of each rank's part of the sequence in the request. Raises Error(kUsage) if the number of lengths or
// their sum is wrong, Error(kPlan) if they do not match the layout.
void place_parts(PlanRequest& request, const std::vector<int64_t>& lengths);

// The terms by which schedule "auto" chooses, of the machine that ANNULUS_MACHINE names, or else of a GPU's host if
// tensors are on a GPU. They stand for bf16 and heads of 128, so that plan_ahead, which sees no tensors, plans what
// attention runs. Ranks that differ in them raise Error(kMismatch). What the ranks of a group know of their hosts and
// free memory is added by terms_in_job (attention/execution/terms_in_job.h).
TermsPointer usual_terms(bool gpu);
// Whether this process sees a GPU, where there are no tensors to tell, and the device that tensors are then assumed on:
// the current GPU, or the CPU.
bool sees_gpus();
at::Device usual_device();

// Returns the call's number from the int64 scalar tensor that its forward returned. Raises Error(kUsage) for another
// tensor.
int64_t number_of(const at::Tensor& number);

// A forward or a backward, for make_call.
struct Direction {
  // Checks the arguments of this direction alone, and returns fields that must be equal on all ranks, such as {"call",
  // "forward"}. Called after the checks of q, k, v and the settings.
  std::function<std::vector<Field>()> terms;
  // In: whether this rank has a gradient of lse; make_call sets it to whether any rank has one.
  bool lse_gradient = false;
};

// Makes the attention call of all ranks of `comm`, the communicator of the settings' group. Collective: an error on one
// rank, or a difference between ranks, is raised on all of them. `keep_last`: this rank can save the keys and values
// that it holds last for its backward; the plan saves them if all ranks can.
AttentionCall make_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& sinks,
                        const Settings& settings, bool keep_last, Direction& direction, Communicator& comm);

}  // namespace annulus::torch_ops
