// See memory_plan.h.
#include "runtime/training/memory_plan.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/proof/plans.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/caches.h"
#include "memory/pool/pool.h"
#include "memory/tiers/offload.h"
#include "memory/tiers/tier_file.h"
#include "memory/tiers/transfers.h"
#include "runtime/model/model.h"
#include "runtime/training/job.h"
#include "runtime/training/mask_bits.h"
#include "runtime/training/offload_config.h"
#include "runtime/training/training_charges.h"

namespace annulus {
namespace {

std::string in_units(int64_t bytes, double unit) { return rounded(static_cast<double>(bytes) / unit, 1); }

}  // namespace

MemoryKinds MemoryPlan::kinds() const {
  MemoryKinds kinds{.weights = step.lasting("weights"),
                    .gradients = step.lasting("gradients"),
                    .optimizer = step.lasting("optimizer"),
                    .activations = step.kept() - step.kept(kWeightsKept)};
  kinds.working = total() - kinds.total();
  return kinds;
}

std::string MemoryPlan::text() const {
  const MemoryKinds held = kinds();
  const bool large = held.total() >= 1'000'000'000;
  const auto show = [&](int64_t bytes) { return in_units(bytes, large ? 1e9 : 1e6); };
  return show(held.total()) + (large ? " GB" : " MB") + " planned for each rank: weights " + show(held.weights) +
         ", gradients " + show(held.gradients) + ", optimizer " + show(held.optimizer) + ", activations " +
         show(held.activations) + ", working memory " + show(held.working) + "; in addition, caches take at most " +
         bytes_text(static_cast<double>(caches_on_device > 0 ? caches_on_device : caches)) +
         (caches_on_device > 0
              ? ", and " + bytes_text(static_cast<double>(caches - caches_on_device)) + " of the host's memory"
              : "") +
         (pool > 0 ? ", and freed memory that is kept for reuse at most " + bytes_text(static_cast<double>(pool))
                   : "") +
         (offloads ? "; offloaded until the backward " + bytes_text(static_cast<double>(offloaded)) : "") +
         (offloads && offloaded == 0 ? ", as memory.device_layers keeps all layers on the device" : "") +
         (state.moved > 0 ? "; offloaded of the optimizer " + bytes_text(static_cast<double>(state.moved)) : "") +
         (save_copy > 0 ? "; a checkpoint is written from a copy of " + bytes_text(static_cast<double>(save_copy))
                        : "") +
         (selects_what_travels ? "; not included is what blocks selected at run time send" : "");
}

namespace {

// Returns the bytes of a rank's slices of a checkpoint that are copied before they are written: of its shard the values
// and two moments, but for what lies in files.
int64_t copied_by_save(const Config& c, const Parameters& parameters, const Sharding& sharding) {
  if (!c.checkpoint.background || c.checkpoint.every == 0) return 0;
  const at::ScalarType dtype = compute_dtype(c), updated = at::toOpMathType(dtype);
  const bool files = c.optimizer.offload == "file";
  const int64_t vectors = !files ? 3 : dtype == updated ? 1 : 0;
  int64_t elements = 0;
  for (const UnitRange& range : shard_ranges(parameters, sharding.shards, 0)) elements += range.count();
  return elements * vectors * static_cast<int64_t>(c10::elementSize(updated));
}

MemoryPlan plan_stage(const Config& c, const Stage& stage, const Sharding& sharding, int context_ranks, int rank,
                      RanksAre are) {
  const bool gpu = are == RanksAre::kGpus;
  const ModelShape shape = model_shape(c);
  const at::ScalarType dtype = compute_dtype(c);
  const int64_t batch = stage.batch / c.mesh.data;
  const int64_t positions = query_layout(stage.layers.distinct[0]).count(rank);
  MemoryPlan plan;
  const std::vector<AttentionCharges> attention =
      layer_charges(stage.layers, batch, rank, parse_kernel(c.attention.kernel, "attention.kernel"),
                    {shape.head_dim(), dtype, gpu, c.model.dropout > 0, shape.softcap > 0}, shape.attention_sinks);
  plan.selects_what_travels =
      context_ranks > 1 && std::any_of(stage.layers.distinct.begin(), stage.layers.distinct.end(),
                                       [](const PlanRequest& request) { return is_adaptive(request.pattern); });
  const int ranks = static_cast<int>(c.mesh.data) * context_ranks;
  plan.step.lasts({"masks of tokens", gpu ? 0 : mask_bytes(c, stage.layers, batch, rank), When::kLasts});
  const std::vector<PlaceCharges> places = add_training_charges(c, stage, positions, ranks, sharding, are, plan.step);
  add_model_charges(shape, {batch, positions, c.model.recompute, offloaded_layers(c)}, {dtype, gpu}, attention, places,
                    plan.step);
  plan.offloads = c.memory.offload != "none";
  plan.offloaded = plan.step.offloaded();
  plan.offloaded_pinned = plan.step.offloaded(Offload::in_pinned_memory);
  Parameters parameters(described_units(shape));
  parameters.lay_out(sharding.shards);
  plan.save_copy = copied_by_save(c, parameters, sharding);
  if (c.optimizer.offload != "none") {
    plan.state = state_tier(parameters, state_traits(c, sharding, /*recorded=*/false));
  }
  plan.caches = c.memory.caches << 20;
  plan.pool = gpu ? 0 : c.memory.pool << 20;
  plan.caches_on_device = gpu ? cache_total_on_device(plan.caches) : 0;
  return plan;
}

}  // namespace

std::vector<AttentionCharges> layer_charges(const LayerRequests& layers, int64_t rows, int rank, KernelKind kind,
                                            CallTraits call, const LayerSwitch& sinks) {
  const at::DeviceType device = call.gpu ? at::kCUDA : at::kCPU;
  const KernelKind planned = planned_kernel(kind, device, call.type, call.head_dim, call.dropout, call.softcap);
  const std::unique_ptr<Kernel> kernel = make_chosen_kernel(planned, device, call.type);
  std::vector<std::array<AttentionCharges, 2>> distinct;  // without and with sinks
  for (const PlanRequest& request : plannable_rows(layers, rows, rank)) {
    const bool has_program = !is_adaptive(request.pattern) && request.ranks > 1;
    const std::shared_ptr<const RankPlan> plan = has_program ? cached_plan(request, rank) : nullptr;
    std::array<AttentionCharges, 2>& both = distinct.emplace_back();
    for (const bool has : {false, true}) {
      call.sinks = has;
      both[has ? 1 : 0] = {attention_charges(request, plan ? &plan->program : nullptr, rank, call, *kernel),
                           output_divisor(request.pattern) > 1};
    }
  }
  std::vector<AttentionCharges> all;
  for (const size_t which : layers.of_layer) {
    all.push_back(distinct[which][sinks.of(static_cast<int64_t>(all.size())) ? 1 : 0]);
  }
  return all;
}

void bound_memory(const MemorySection& memory) {
  set_cache_total(memory.caches << 20);
  Pool::process().set_bound(memory.pool << 20);
}

MemoryPlan plan_memory(const Config& c, const std::vector<Stage>& stages, const Sharding& sharding, int context_ranks,
                       int rank, RanksAre are) {
  MemoryPlan most = plan_stage(c, stages[0], sharding, context_ranks, rank, are);
  for (size_t i = 1; i < stages.size(); ++i) {
    MemoryPlan plan = plan_stage(c, stages[i], sharding, context_ranks, rank, are);
    if (plan.total() > most.total()) most = std::move(plan);
  }
  return most;
}

double least_memory(const Config& c, const Sharding& s, int context_ranks) {
  const double element = static_cast<double>(c10::elementSize(compute_dtype(c)));
  double tokens = 0;
  for (const ContextSchedule::Stage& stage : c.data.context.stages) {
    const double rows = static_cast<double>(c.data.batch_of(stage)) / static_cast<double>(c.mesh.data);
    tokens = std::max(tokens, rows * static_cast<double>(stage.context) / context_ranks);
  }
  const double streams =
      static_cast<double>(c.model.layers - offloaded_layers(c)) * tokens * static_cast<double>(c.model.dim) * element;
  // Weights, gradients and, unless they are offloaded, two moments, each of them whole or one shard of it.
  const int kinds = c.optimizer.offload == "none" ? 4 : 2;
  const int whole = s.level == 0 ? kinds : s.level == 1 ? 2 : s.level == 2 ? 1 : 0;
  const double copies = whole + static_cast<double>(kinds - whole) / s.shards;
  return copies * element * parameter_estimate(model_shape(c)) + streams;
}

OffloadPlan plan_offload(const Config& c, const MemoryPlan& memory, int ranks, RanksAre are) {
  OffloadPlan plan;
  if (c.optimizer.offload == "host") plan.optimizer_host = memory.state.pinned * ranks;
  if (c.optimizer.offload == "file") {
    plan.optimizer_files = memory.state.in_file * ranks;
    if (are == RanksAre::kGpus) plan.optimizer_host = memory.state.buffers * ranks;
  }
  plan.host = plan.optimizer_host, plan.files = plan.optimizer_files;
  if (are == RanksAre::kGpus) plan.host += offloaded_files(c) * Transfers::kHeld * ranks;
  if (memory.offloaded == 0) return plan;
  const bool host = c.memory.offload == "host";
  const int64_t layer = memory.offloaded / offloaded_layers(c) + 1, pinned = memory.offloaded_pinned * ranks;
  int64_t in_host = 0;
  if (host && c.memory.host.empty()) in_host = pinned;
  if (host && !c.memory.host.empty()) {
    const int64_t left = *bytes_of_text(c.memory.host) - (c.optimizer.offload == "host" ? plan.optimizer_host : 0);
    in_host = std::clamp<int64_t>(left, 0, pinned);
  }
  plan.host += in_host;
  if (host && in_host == pinned) return plan;
  // Whole layers go to one or the other.
  const double share = host ? static_cast<double>(in_host) / static_cast<double>(pinned) : 0;
  const int64_t kept = static_cast<int64_t>(share * static_cast<double>(memory.offloaded)) * ranks;
  plan.files += memory.offloaded * ranks - kept + (host ? layer * ranks : 0);
  if (are == RanksAre::kGpus) plan.host += 2 * memory.offloaded_pinned / offloaded_layers(c) * ranks;
  return plan;
}

int64_t lacking(const Config& config, const MemoryPlan& plan, const FitRanks& of) {
  const bool gpu = of.are == RanksAre::kGpus;
  const int64_t beside = std::min(plan.total(), gpu ? plan.caches_on_device : plan.caches + plan.pool);
  const OffloadPlan offload = plan_offload(config, plan, of.ranks_of_a_host, of.are);
  double lacks = static_cast<double>(plan.total() + beside + (gpu ? 0 : plan.save_copy)) - of.memory;
  const auto tier = [&](int64_t bytes, const std::optional<double>& free) {
    if (bytes > 0 && free) lacks = std::max(lacks, (static_cast<double>(bytes) - *free) / of.ranks_of_a_host);
  };
  tier(offload.host, of.host_memory);
  tier(offload.files, of.files);
  return static_cast<int64_t>(std::ceil(lacks));
}

bool save_copy_fits(const MemoryPlan& plan, const OffloadPlan& offload, int ranks, RanksAre are,
                    const std::optional<AvailableMemory>& available) {
  if (!available || !switch_from_environment("ANNULUS_MEMORY_CHECK", true)) return true;
  const int64_t copies = plan.save_copy * ranks;
  return copies + (are == RanksAre::kGpus ? offload.host : plan.total() * ranks) <= available->bytes;
}

void require_offload(const Config& c, const OffloadPlan& plan, int ranks, const std::function<std::string()>& nearest) {
  if (!switch_from_environment("ANNULUS_MEMORY_CHECK", true)) return;
  const std::string skip = "; ANNULUS_MEMORY_CHECK=0 skips this check";
  const auto require = [&](int64_t needed, int64_t free, const std::string& what, const std::string& where,
                           const std::string& less) {
    if (needed <= free) return;
    const std::string keys = offload_keys(c);
    throw Error(ErrorKind::kResource, "memory",
                keys + (keys.find(' ') == std::string::npos ? " needs " : " need ") +
                    bytes_text(static_cast<double>(needed)) + " of " + what + " for the " + counted(ranks, "rank") +
                    " of this host, and " + bytes_text(static_cast<double>(free)) + " are free" + where + ": " +
                    nearest() + "; " + less + skip);
  };
  if (c.optimizer.offload == "host" && !c.memory.host.empty() && plan.optimizer_host > *bytes_of_text(c.memory.host)) {
    throw Error(ErrorKind::kResource, "memory",
                "optimizer.offload = \"host\" needs " + bytes_text(static_cast<double>(plan.optimizer_host)) +
                    " of the host's memory for the " + counted(ranks, "rank") +
                    " of this host, more than memory.host = " + c.memory.host +
                    ": set optimizer.offload = \"file\", or memory.host to more" + skip);
  }
  int64_t in_memory = plan.host;
  if (plan.files > 0) {
    const std::string folder = offload_folder(c);
    require(plan.files, free_bytes_in(folder, offload_keys(c)), "files", " in " + folder,
            "memory.files may name a folder on another disk, and more hosts need less on each");
    if (lies_in_memory(folder)) in_memory += plan.files;
  }
  if (const std::optional<AvailableMemory> free = available_memory(); free && in_memory > 0) {
    const bool to_files = c.memory.offload != "host" && c.optimizer.offload == "host";
    require(in_memory, free->bytes, "the host's memory", " (" + free->limit + ")",
            in_memory > plan.host ? "memory.files may name a folder on a disk; this one lies in memory (tmpfs)"
            : to_files            ? "optimizer.offload = \"file\" needs a disk in its place"
                                  : "memory.host bounds it, and the rest goes to files");
  }
}

void require_memory(const char* what, double bytes, int ranks, const std::optional<AvailableMemory>& available,
                    const std::function<std::string()>& nearest) {
  const bool asked = switch_from_environment("ANNULUS_MEMORY_CHECK", true);
  const bool too_much = asked && available && bytes * ranks > static_cast<double>(available->bytes);
  if (!too_much && bytes < kAnyMachine) return;
  std::string text = "the run needs " + std::string(what) + bytes_text(bytes) + " a rank";
  if (too_much) {
    if (ranks > 1) text += ", " + bytes_text(bytes * ranks) + " for the " + counted(ranks, "rank") + " of this host";
    text += ", and " + bytes_text(static_cast<double>(available->bytes)) + " are free (" + available->limit +
            "): " + nearest() +
            "; fewer rows (data.batch), a smaller model or more ranks on other hosts also take less, and "
            "ANNULUS_MEMORY_CHECK=0 skips this check";
  } else {
    text += ", more than any machine has: use a smaller size in [model] or [data]";
  }
  throw Error(ErrorKind::kResource, "memory", text);
}

}  // namespace annulus
