// Computes the memory that a training step needs on a rank from a configuration, before any of it is taken. The trainer
// prints it and compares it with the available memory, `annulus fit` shows it, and tests compare it with what
// LibTorch's allocator hands out. It is the sum of what each part of a step declares beside its code (memory/charge.h);
// this file contains no code for particular parts.
//
// Thread safety: plain data and functions without state.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/execution/attention_charges.h"
#include "attention/kernels/choose_kernel.h"
#include "memory/available.h"
#include "memory/charge.h"
#include "runtime/config/config.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/state/sharding.h"
#include "runtime/training/state/state_tier.h"
#include "runtime/training/training_charges.h"

namespace annulus {

// The most that a rank holds at once, in bytes, by purpose.
struct MemoryKinds {
  int64_t weights = 0, gradients = 0, optimizer = 0;
  int64_t activations = 0;  // kept for the backward when the forward has ended
  // The rest at the peak: memory of operators and attention, gathered weights, gradients being summed, and the input.
  int64_t working = 0;

  int64_t total() const { return weights + gradients + optimizer + activations + working; }
};

// All sizes are in bytes.
struct MemoryPlan {
  StepCharges step;
  // The most that all caches may hold (memory/caches.h), and the part of it that lies on the device. total() does not
  // include it, because what the caches will hold depends on the plans.
  int64_t caches = 0;
  int64_t caches_on_device = 0;
  // The most that the pool may keep of memory that the step has freed (memory/pool/pool.h), on a CPU. total() does not
  // include it: what the pool keeps was in use at another moment of the step.
  int64_t pool = 0;
  // What memory.offload moves away from the device until the backward, and what that takes in a host's memory.
  int64_t offloaded = 0, offloaded_pinned = 0;
  bool offloads = false;  // whether memory.offload is set
  StateTier state = {};   // what optimizer.offload moves away from the device
  // What checkpoint.background copies to the host's memory; a rank with CPU tensors holds it beside total(), which does
  // not include it, because a run for which it is not free trains without it.
  int64_t save_copy = 0;
  // True if there are several ranks and a pattern selects its blocks at run time. total() does not include what then
  // travels for it.
  bool selects_what_travels = false;

  // The peak: the most that is held at once.
  int64_t total() const { return step.most().bytes; }
  // The peak divided by purpose; the members add up to total().
  MemoryKinds kinds() const;
  // What the peak holds in addition to what lasts and what is kept for the backward when the forward has ended. If the
  // peak lies later in the backward, some of what was kept has been freed by then and reduces this number.
  int64_t working() const { return total() - step.lasting() - step.kept(); }
  // Returns "12.3 GB planned for each rank: weights 2.5, ...; in addition, caches take at most 1.9 GB".
  std::string text() const;
};

// Where the offloaded bytes of the ranks of a host lie.
struct OffloadPlan {
  int64_t host = 0, files = 0;                      // bytes
  int64_t optimizer_host = 0, optimizer_files = 0;  // the part of them that is the optimizer's state
};
// Returns it for `ranks` ranks of a host with this plan. Between GPUs and files, a rank has two layers, the chunks of
// the optimizer's state that are on their way, and the buffers of the files in the host's memory. Of memory.host the
// optimizer's state is taken first.
OffloadPlan plan_offload(const Config& config, const MemoryPlan& plan, int ranks, RanksAre are);

// Whether the copies of a checkpoint of `ranks` ranks of a host, each with this plan, would fit as well. `available` is
// what their tensors may take; on GPUs the copies lie in the host's memory instead, of which `offload` takes a part.
// True if what is free is not known, and with ANNULUS_MEMORY_CHECK=0.
bool save_copy_fits(const MemoryPlan& plan, const OffloadPlan& offload, int ranks, RanksAre are,
                    const std::optional<AvailableMemory>& available);

// Sets what the caches and the pool of this process may hold to what a configuration says.
void bound_memory(const MemorySection& memory);

// Raises Error(kResource) if the ranks of this host need more memory or disk for it than is free, if the optimizer's
// state takes more than memory.host, or if there is no such folder. Does nothing with ANNULUS_MEMORY_CHECK=0. `nearest`
// is that of require_memory.
void require_offload(const Config& config, const OffloadPlan& plan, int ranks,
                     const std::function<std::string()>& nearest);

// Returns what the attention of each layer declares on rank `rank` of the context axis, for the first `rows` rows of
// the batch. `call` is that of all layers but for their `sinks`.
std::vector<AttentionCharges> layer_charges(const LayerRequests& layers, int64_t rows, int rank, KernelKind kernel,
                                            CallTraits call, const LayerSwitch& sinks);

// Plans for rank `rank` of the mesh's context axis, which has `context_ranks`. `stages` is the result of
// training_stages() for that many ranks, `sharding` that of make_sharding() for all ranks. Of several stages the one
// that takes the most is returned.
MemoryPlan plan_memory(const Config& config, const std::vector<Stage>& stages, const Sharding& sharding,
                       int context_ranks, int rank, RanksAre are);

// Returns a lower bound of the bytes that a rank holds: its part of weights, gradients and moments, and the residual
// stream of each layer. Call it before plan_memory, whose integers could overflow for sizes that no machine has; this
// function computes in fp64.
double least_memory(const Config& config, const Sharding& sharding, int context_ranks);

// Sizes in bytes from here on are refused: no machine has as many, and products of them would soon overflow 64 bits.
inline constexpr double kAnyMachine = 1e16;

// The ranks to plan for.
struct FitRanks {
  int ranks = 1;
  int ranks_of_a_host = 1;
  RanksAre are = RanksAre::kGpus;
  double memory = 0;  // bytes that each may take
  // Bytes that the ranks of a host may offload to its memory and to files, together. Nothing: any number.
  std::optional<double> host_memory = {}, files = {};
  // The rank of the context axis to plan. Nothing: the one that needs the most, of all ranks, or of the first two, the
  // middle one and the last two where there are more than 16. In the layouts zigzag and striped all ranks need the
  // same, except for a row.
  std::optional<int> planned = {};
};

// By how many bytes a rank with this plan takes more than it has, with what the plan names beside the step, also in the
// host's memory and files; at most 0 if it fits. `auto` stands for attention with which nothing is lacking
// (choose_for_run). Of small runs caches and pool hold far less than they may: they count as no more than the step.
int64_t lacking(const Config& config, const MemoryPlan& plan, const FitRanks& of);

// Raises Error(kResource) if `ranks` ranks that need `bytes` each need more than `available` (nothing: not known; with
// ANNULUS_MEMORY_CHECK=0 this is not checked), or if `bytes` is more than any machine has. `what` is "at least " if
// `bytes` is a lower bound, otherwise empty. `nearest` returns a text about what would fit
// (runtime/training/fitting.h); it is called only if that text is needed.
void require_memory(const char* what, double bytes, int ranks, const std::optional<AvailableMemory>& available,
                    const std::function<std::string()>& nearest);

}  // namespace annulus
