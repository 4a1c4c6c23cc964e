// Operators of torch.ops.annulus that report: plan (what a plan costs, and its proof), stats (what was sent) and
// build_info (how this library was built), which return JSON; plan_ahead, which plans in advance; and choose_layout,
// which says in which layout attention takes least time. Only choose_layout is collective. python/annulus and users
// call them (docs/reference/python.md).
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <torch/version.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/execution/plan_report.h"
#include "attention/execution/terms_in_job.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/detect.h"
#include "attention/modules/sequence.h"
#include "attention/plan/balance.h"
#include "attention/plan/choice.h"
#include "attention/plan/layout.h"
#include "attention/proof/plans.h"
#include "common/version.h"
#include "python/ops/call.h"
#include "python/ops/counts.h"
#include "python/ops/launched.h"
#include "python/ops/world.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus::torch_ops {
namespace {

using Json = nlohmann::ordered_json;

struct AllCounts {
  std::mutex mutex;
  std::map<std::string, GroupCounts> groups;
};
AllCounts& all_counts() {
  static AllCounts& all = *new AllCounts;  // never destroyed, because threads may outlive static objects
  return all;
}

// The request of a whole problem, from arguments as attention takes them. kv_heads 0 stands for `heads`, an empty
// key_length for `length`; `lengths` gives the ranks contiguous parts of these lengths instead of a layout.
PlanRequest request_of(const std::string& pattern, int64_t length, int64_t ranks, int64_t heads, int64_t kv_heads,
                       int64_t batch, const std::string& layout, const std::string& schedule, int64_t within,
                       int64_t query_offset, std::optional<int64_t> key_length,
                       const std::optional<std::vector<int64_t>>& lengths, const std::optional<at::Tensor>& cu_seqlens,
                       bool keep) {
  PlanRequest request;
  request.shape = aligned({.batch = batch,
                           .heads = heads,
                           .kv_heads = kv_heads == 0 ? heads : kv_heads,
                           .q_len = length,
                           .k_len = key_length.value_or(length),
                           .query_offset = query_offset});
  set_layout(request, layout);
  set_schedule(request, schedule, within);
  require(ranks >= 1 && ranks <= 1 << 20, "ranks must be from 1 to 1048576, but is " + std::to_string(ranks));
  request.ranks = static_cast<int>(ranks);
  // If the layout gives the ranks parts of these lengths, the layout stays, as in attention.
  if (lengths) place_parts(request, *lengths);
  request.keep_last = keep;
  request.pattern = pattern_for(pattern, cu_seqlens, request.shape);
  return request;
}

std::string plan(std::string pattern, int64_t length, int64_t ranks, int64_t heads, int64_t kv_heads, int64_t batch,
                 int64_t head_dim, int64_t element_bytes, std::string layout, std::string schedule, int64_t within,
                 int64_t query_offset, std::optional<int64_t> key_length, std::optional<std::vector<int64_t>> lengths,
                 std::optional<at::Tensor> cu_seqlens, bool keep, bool prove, std::string machine) {
  require(head_dim > 0 && element_bytes > 0, "head_dim and element_bytes must be at least 1");
  const bool any_layout = layout == kAutoLayout;
  require(!any_layout || !lengths, "lengths gives each rank a contiguous part, so there is no layout to choose");
  PlanRequest request = request_of(pattern, length, ranks, heads, kv_heads, batch, any_layout ? "zigzag" : layout,
                                   schedule, within, query_offset, key_length, lengths, cu_seqlens, keep);
  request.terms = terms_of(machine, "machine", "cpu", head_dim, element_bytes);
  const auto say = [](const std::string&) {};
  PlanReport report(request, head_dim, element_bytes, prove, say,
                    any_layout ? layouts_of_auto() : std::vector<LayoutKind>{});
  if (prove) report.prove(say);
  return report.json();
}

void plan_ahead(std::string pattern, int64_t length, int64_t heads, int64_t kv_heads, int64_t batch, std::string group,
                std::string layout, std::string schedule, int64_t within, int64_t query_offset,
                std::optional<int64_t> key_length, std::optional<std::vector<int64_t>> lengths,
                std::optional<at::Tensor> cu_seqlens, bool keep) {
  const Place place = place_in(group);
  PlanRequest request = request_of(pattern, length, place.size, heads, kv_heads, batch, layout, schedule, within,
                                   query_offset, key_length, lengths, cu_seqlens, keep);
  if (request.schedule == ScheduleKind::kAuto) {
    request.terms = usual_terms(sees_gpus());
    if (const auto comm = used_communicator(group, usual_device())) request.terms = terms_in_job(request.terms, *comm);
  }
  require_plannable(request);
  plan_ahead(request, static_cast<int>(place.rank), proves_by_default());
}

std::tuple<std::string, std::string> choose_layout(std::string pattern, int64_t length, int64_t heads, int64_t kv_heads,
                                                   int64_t batch, std::string group, std::string schedule,
                                                   int64_t within) {
  const Turn turn = take_turn(group, at::Tensor());
  PlanRequest request;
  std::string unmasked;
  const SequenceParts parts = agree_on_call(
      [&]() -> CallTerms {
        unmasked = without_masks(*pattern_of(pattern)).text();
        dealt_by("balanced", unmasked, std::nullopt);  // checks it
        request = request_of(unmasked, length, turn.comm->size(), heads, kv_heads, batch, "zigzag", schedule, within,
                             /*query_offset=*/0, std::nullopt, std::nullopt, std::nullopt, /*keep=*/true);
        request.terms = usual_terms(sees_gpus());
        return {.alike = {{"problem", request.text()}, {"machine", request.terms.text()}},
                .free_bytes = free_bytes(*turn.comm, usual_device())};
      },
      *turn.comm, {"torch.ops.annulus.choose_layout", 0});
  request.terms = within_memory(on_hosts(request.terms, turn.comm->hosts()), static_cast<double>(parts.free_bytes),
                                /*or_leanest=*/true);
  const LayoutChoice choice = choose_layout(request);
  const std::string name(to_string(choice.layout));
  return {is_dealt(choice.layout) ? dealt_by(name, unmasked, std::nullopt) : name, choice.reason};
}

std::string stats(std::string group) {
  const GroupCounts counts = counts_of(group);
  const PlanStats plans = plan_stats();
  const auto of = [](const Counts& c) {
    return Json{{"calls", c.calls},
                {"messages_sent", c.messages_sent},
                {"bytes_sent", c.bytes_sent},
                {"exposed_seconds", c.exposed_seconds}};
  };
  return Json{{"forward", of(counts.forward)},
              {"backward", of(counts.backward)},
              {"plans", {{"made", plans.programs_made}, {"seconds_on_path", plans.seconds_on_path}}}}
      .dump(2);
}

std::string build_info() {
  Json kernels = Json::array();
  for (const DetectedKernel& kernel : detected_kernels()) {
    kernels.push_back({{"name", kernel.name}, {"found", kernel.found}, {"note", kernel.note}});
  }
  return Json{{"version", kVersion},
              {"torch", TORCH_VERSION},
              {"mpi", kHasMpi},
              {"cuda", built_for_cuda()},
              {"cpu_kernel", choose_kernel(KernelKind::kAuto, at::kCPU, at::kFloat, 64, false).reason},
              {"kernels", std::move(kernels)}}
      .dump(2);
}

}  // namespace

void count(const std::string& group, Counts GroupCounts::*direction, const AttentionStats& call) {
  const std::lock_guard lock(all_counts().mutex);
  Counts& counts = all_counts().groups[group].*direction;
  ++counts.calls;
  counts.messages_sent += call.messages_sent;
  counts.bytes_sent += call.bytes_sent;
  counts.exposed_seconds += call.exposed_seconds;
}

GroupCounts counts_of(const std::string& group) {
  const std::lock_guard lock(all_counts().mutex);
  const auto found = all_counts().groups.find(group);
  return found == all_counts().groups.end() ? GroupCounts{} : found->second;
}

TORCH_LIBRARY_FRAGMENT(annulus, m) {
  // The JSON that `annulus plan --json` prints, for the plan of a whole problem over `ranks` ranks.
  m.def(
      "plan(str pattern, int length, int ranks, *, int heads=1, int kv_heads=0, int batch=1, int head_dim=128, "
      "int element_bytes=2, str layout=\"contiguous\", str schedule=\"auto\", int within=0, int query_offset=0, "
      "int? key_length=None, int[]? lengths=None, Tensor? cu_seqlens=None, bool keep=True, bool prove=True, "
      "str machine=\"\") -> str",
      plan);
  // Begins on another thread to plan a later attention over the ranks of `group`, and to prove this rank's part of the
  // plan. That attention finds the plan, or waits until it is ready. `length` is that of the whole sequence. `keep`
  // must be false if the attention is compiled by torch.compile.
  m.def(
      "plan_ahead(str pattern, int length, *, int heads=1, int kv_heads=0, int batch=1, str group=\"\", "
      "str layout=\"contiguous\", str schedule=\"auto\", int within=0, int query_offset=0, int? key_length=None, "
      "int[]? lengths=None, Tensor? cu_seqlens=None, bool keep=True) -> ()",
      plan_ahead);
  // The layout in which attention over the ranks of `group` is predicted to take least time, as attention takes it, and
  // why. `length` is that of the whole sequence. Collective: all ranks pass the same.
  m.def(
      "choose_layout(str pattern, int length, *, int heads=1, int kv_heads=0, int batch=1, str group=\"\", "
      "str schedule=\"auto\", int within=0) -> (str layout, str reason)",
      choose_layout);
  // What this rank has sent in attention over the ranks of `group`, and what the process has planned.
  m.def("stats(str group=\"\") -> str", stats);
  m.def("build_info() -> str", build_info);
}

}  // namespace annulus::torch_ops
