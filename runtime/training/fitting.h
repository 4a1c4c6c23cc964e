// Finds out whether a configuration fits into the memory of a rank at each level of optimizer.shard, whatever layers
// keep for the backward, and how long its rows could be. It makes memory plans (memory_plan.h) of configurations that
// differ only in these keys, so it takes no memory for a model and needs none of the ranks. `annulus fit` uses it, and
// so does the trainer, whose error about too little memory says what would fit. Thread safety: functions without state.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/memory_plan.h"

namespace annulus {

// Bytes that leave a rank in a step, over all layers and all batches that the step accumulates.
struct AttentionTraffic {
  double keys_and_values = 0;  // of forward and backward, in the dtype that the model computes in
  double gradients = 0;        // of keys and values, in the backward, in the dtype of sums
  double queries = 0;          // queries and results of schedules that move them, with what belongs to them

  double total() const { return keys_and_values + gradients + queries; }
};

// Computes the traffic of rank `rank` of the context axis, by the programs that the step runs, which the memory plan
// has cached. `stages` is the result of training_stages() for its ranks; of several stages the one in which the most is
// sent counts. Documents of the data are not considered: a step with documents that end within a row sends at most as
// much. Nothing is counted for layers whose pattern selects its blocks at run time.
AttentionTraffic attention_traffic(const Config& config, const std::vector<Stage>& stages, int rank);

// The longest rows, in tokens, that are tried.
inline constexpr int64_t kLongestPlanned = int64_t{1} << 27;

// What the device keeps, from most to least. The state of the optimizer is where optimizer.offload says, but for the
// last of them.
enum class Keeps {
  kAll,
  kRecomputed,  // model.recompute
  kOffloaded,   // memory.offload as well: as configured, or "host" on GPUs and "file" on CPUs
  kOptimizer,   // optimizer.offload as well, likewise
};
inline constexpr std::array<Keeps, 4> kAllKeeps = {Keeps::kAll, Keeps::kRecomputed, Keeps::kOffloaded,
                                                   Keeps::kOptimizer};
// Returns "all", "recompute", "offload" or "optimizer".
const char* to_string(Keeps keeps);

// Where memory.offload and optimizer.offload put what leaves the device: "none", "host" or "file".
struct Tiers {
  std::string memory = "none", optimizer = "none";

  bool operator==(const Tiers&) const = default;
};

// The attention of a run, in which `auto` stands for what the run would choose with the memory that is planned for.
struct FitAttention {
  std::string text;      // attention_text()
  bool leanest = false;  // RunChoice::leanest
  int rank = 0;          // of the context axis, the one that needs the most, of those that are compared
};

// The result for one level, for the device alone.
struct Fit {
  int level = 0;
  Keeps keeps = Keeps::kAll;
  FitAttention attention = {};
  MemoryKinds bytes = {};  // with rows as configured
  bool fits = false;
  // The longest rows that fit, in tokens, with the attention that takes least: a multiple of U, which is twice the
  // ranks of the context axis; 0 if none fit. A plan with rows of this length fits, and one with U more tokens does not
  // or is beyond kLongestPlanned. Example: with 8 context ranks, 65,536 means that rows of 65,536 fit and rows of
  // 65,552 do not. Nothing if the configuration cannot be planned with other lengths (a block map from a file has one
  // length).
  std::optional<int64_t> longest = {};
};

// The bytes that a rank sends in a step: for gradients and weights on average over the shards of one replica; for
// attention, with what is configured to be kept, those of the rank that sends the most, of those that are compared.
struct FitTraffic {
  int level = 0;
  double reduced = 0, gathered = 0;
  AttentionTraffic attention = {};
};

// A way to train at the highest level: what the device keeps, and to which tiers the rest goes. On GPUs these are the
// host's memory and files, on CPUs files.
struct FitWay {
  Keeps keeps = Keeps::kAll;
  Tiers tiers = {};
  FitAttention attention = {};
  int64_t device = 0;        // bytes of a rank
  OffloadPlan of_host = {};  // where the ranks of a host have the rest
  // What a rank sends to the tiers in a step, and has back: of layers for each batch, and of the optimizer.
  int64_t moved = 0, optimizer_moved = 0;
  bool fits = false;                    // on the device, in the host's memory and in files
  std::optional<int64_t> longest = {};  // as Fit::longest, for all three

  int64_t total_moved() const { return moved + optimizer_moved; }
};

struct FitTable {
  int64_t parameters = 0;
  int data = 1, context = 1;     // ranks of the mesh's axes
  int shards = 1, replicas = 1;  // runtime/training/state/sharding.h
  int64_t caches = 0, caches_on_device = 0;
  int64_t save_copy = 0;              // as in MemoryPlan; the same at every level
  bool selects_what_travels = false;  // as in MemoryPlan
  std::vector<Fit> fits = {};         // level 0 with each of kAllKeeps, then level 1, ...
  std::vector<FitWay> ways = {};      // from the one that keeps the most on the device to the one that keeps the least
  double flops = 0;                   // that a rank computes in a step, forward and backward
  std::vector<FitTraffic> traffic = {};  // of each level
};

// If one rank holds the whole state, all levels are the same and only level 0 is planned. With a schedule of lengths,
// `bytes` is that of the stage that takes the most, and `longest` is one length for the whole run, with the batch of
// the longest stage. Raises what check_training raises, and Error(kResource) for sizes that no machine has. `progress`
// is called with a text about each plan.
FitTable what_fits(const Config& config, const FitRanks& ranks,
                   const std::function<void(const std::string&)>& progress = nullptr);

// The smallest change of a configuration that makes it fit on the device, in the host's memory and in files: none, a
// higher level, recomputation, both, offload as well, that of the optimizer too, or the longest rows that fit at the
// highest level.
struct NearestFit {
  bool found = false;
  int level = 0;
  Keeps keeps = Keeps::kAll;
  Tiers tiers = {};
  ContextSchedule context = {};
  // For example "optimizer.shard = 2 fits (61.2 GB a rank)"; if nothing fits, the reason.
  std::string text = {};
};
NearestFit nearest_fit(const Config& config, const FitRanks& ranks);

}  // namespace annulus
