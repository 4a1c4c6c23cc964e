// Makes the plan requests of a model's layers from a configuration. Training plans its attention from them; the memory
// plan and runtime/inference/inspection.cc use them, too. Thread safety: no state.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/rollouts.h"
#include "attention/plan/plan.h"
#include "comm/hosts.h"
#include "runtime/config/config.h"

namespace annulus {

struct LayerRequests {
  // The different requests, for the global batch and without documents of the data. Block maps in files have been read,
  // and masks of tokens, but for their bits: mask_bits.h reads those.
  std::vector<PlanRequest> distinct;
  std::vector<size_t> of_layer;  // by layer: an index into `distinct`
  std::string layout_reason;     // why attention.layout "auto" is this layout; empty for another

  // The (query, key) pairs counted for one token over all layers and query heads. Adaptive maps count as if they kept
  // the blocks nearest to the diagonal; of blocks that a mask shows in part all pairs count.
  double pairs_per_token() const;

  // Whether a query of any layer sees later keys (sees_later in attention/pattern/pattern.h).
  bool see_later() const;

  // Divides rows by this layout. Layers of a model with several patterns share one that is balanced
  // (PlanRequest::balance_by).
  void set_layout(LayoutKind layout);

  // Returns `distinct` for `count` rows of the global batch from `first` on: those of one data-parallel rank.
  std::vector<PlanRequest> of_rows(int64_t first, int64_t count) const;
};

// Restricts requests to pairs within the documents of each batch row, or to those of prefix trees. A balanced layout
// follows. Raises Error(kPlan) for trees and a pattern other than causal.
void set_documents(std::vector<PlanRequest>& requests, const std::vector<RowParts>& rows);

// Raises Error(kPlan) unless every layer's pattern is causal, as data with prefix trees demand.
void require_causal(const std::vector<PlanRequest>& requests);

// Whether batches have layouts of their own, because documents are apart and the layout is dealt by their pairs.
bool layout_follows_documents(const Config& config);

// A stage of the data: from `step` on, the length of rows in tokens, the number of rows that pass through the model
// together, how many such batches a step has, and the requests from which their attention is planned.
struct Stage {
  int64_t step = 0;
  int64_t context = 0;
  int64_t batch = 0;       // rows, over all ranks
  int64_t accumulate = 1;  // batches in a step
  LayerRequests layers;
  bool weighs = false;  // whether the data's targets have weights, which take memory (Dataset::weighs_targets)

  int64_t tokens() const { return batch * accumulate * context; }  // of a step
};

// Tells stages what their data hold: weights of targets, and prefix trees, for which it raises as require_causal.
void take_data(std::vector<Stage>& stages, bool weighs, bool trees);

// The terms by which `auto` chooses (attention/plan/time.h), where the ranks compute on `device`, "cpu" or "cuda".
// Raises as find_machine does.
TermsPointer attention_terms(const Config& config, std::string_view device);

// Returns the stages of a configuration in order, for this many ranks along the mesh's context axis. Raises
// Error(kPlan) for a pattern, shape or layout that is impossible, Error(kInput) for a file that cannot be read, and
// Error(kResource) for a mask of which a rank would hold more than memory.masks.
std::vector<Stage> training_stages(const Config& config, int context_ranks);

// Lets `stages`, which differ from `chosen` in their lengths, have the layouts and schedules that `auto` stands for in
// `chosen`, so that the memory of longer rows is that of the same schedule. `data_ranks` is the size of the mesh's data
// axis.
void keep_schedules(const std::vector<Stage>& chosen, int64_t data_ranks, std::vector<Stage>& stages);

// By how many bytes a run with such stages would take more than is free, on the rank that lacks the most; at most 0 if
// it fits. Nothing: what is free is not known. Where it is collective, all ranks call it alike.
using Lacks = std::function<std::optional<double>(const std::vector<Stage>& stages)>;

// What `auto` was found to stand for.
struct RunChoice {
  // For each stage whose layout is `auto`, and for each of its requests whose schedule is: what is chosen and why, and
  // why not the others; of a recorded choice, one line a stage. Adaptive patterns, whose calls choose for themselves,
  // are left out.
  std::vector<std::string> lines;
  std::string warning;   // why it is not what was recorded, if that is so
  std::string record;    // for a checkpoint; empty if nothing was to be chosen
  bool leanest = false;  // whether it is what takes least, because nothing fits or what is free is not known
};

// Lets the stages of check_training have the layout and schedules that are predicted to take the least time of those
// with which the run fits, on this device and the hosts of the ranks that attend together. Where several layers differ
// in what would not fit, the one that holds the most yields first. If nothing fits, they have that with which the run
// takes least; if what is free is not known, the schedules that hold least themselves. `recorded` is the record of an
// earlier choice, or empty: stages for which the same was asked then keep it as long as the run fits. All ranks come to
// the same if `lacks` returns the same on them.
RunChoice choose_for_run(std::vector<Stage>& stages, const Config& config, std::string_view device,
                         const RankHosts& hosts, const Lacks& lacks, const std::string& recorded);

// The schedules of stages, to show them, and their layouts: "ring; group-cast, within 8, layout zigzag". Nothing for
// one rank, and no schedule for adaptive patterns.
std::string attention_text(const std::vector<Stage>& stages, bool layouts);

// After what stages hold has been planned: lets the calls of batches whose documents are apart, and those of adaptive
// patterns, choose again among the schedules that hold no more than the one chosen by choose_for_run.
void let_calls_choose(std::vector<Stage>& stages, const Config& config);

}  // namespace annulus
