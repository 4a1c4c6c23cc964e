// ModelState holds what is trained on one rank: the weights that are updated, their gradients, and the copies that the
// model computes with, each of them whole or sharded (sharding.h). It also runs the collectives that sum gradients
// while the backward runs and that gather weights before their places need them. training.cc uses it.
//
// A unit (runtime/model/parameters.h) is gathered and summed at once. While a place of the model (weight_use.h) runs,
// at level 3 the unit of the next place is gathered, in the backward that of the place before, and the gradients of the
// place that ran last are summed. A place begins after the one that ran last has let its unit go, so at most the
// weights of two neighbouring places are there at once: those of one layer, unless the output or the embedding is one
// of them.
//
// Every level of sharding computes the same numbers in the same order: gradients are summed by a reduce_scatter (which
// level 0 follows by an all_gather), the squares of each shard are summed separately, and updates are element by
// element. So for a given world all levels give the same bits.
//
// Every rank of the world calls the same functions in the same order, because most of them communicate. Not
// thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "memory/tiers/tiered_tensors.h"
#include "runtime/model/model.h"
#include "runtime/run/tensor_slice.h"
#include "runtime/training/state/copies.h"
#include "runtime/training/state/optimizer.h"
#include "runtime/training/state/sharding.h"

namespace annulus {

// Bytes of memory that a rank holds. What lies in a tier does not count.
struct StateBytes {
  int64_t weights = 0, gradients = 0;
};

class ModelState final : public WeightUse {
 public:
  // Fills the weights from `seed`. The model must have been made without weights (Model::Unheld) for as many parts as
  // there are shards. It, the world and the tier must outlive this object. If steps are not recorded, the model calls
  // this object before and after it uses weights. With a tier, values that are not leaves lie there; it is null unless
  // traits.offloaded is set.
  ModelState(Model& model, Communicator& world, const StateTraits& traits, uint64_t seed,
             TieredTensors* tier = nullptr);
  ~ModelState() override;

  // A step consists of passes forward and backward, each between begin_pass and end_pass, followed by squares() and
  // finish_gradients(). If the weights are to change, the optimizer then updates updated(), and changed() is called.
  // `step` is the step's number for messages; `first` and `last` say whether this is the step's first or last pass.
  void begin_pass(int64_t step, bool first, bool last);
  void end_pass();
  // Returns the sum of the squares of this rank's shard of the gradients, fp64 []. It is computed in chunks of a fixed
  // size, so that it does not depend on the number of threads. On a GPU the norm of a chunk is in the gradients' dtype,
  // so in fp32 it is infinite for a gradient above 1.8e19.
  at::Tensor squares() const;
  void finish_gradients();
  // Called before a forward outside a step, such as a validation's.
  void begin_forward();
  // What this rank updates, by unit. These tensors stay valid as long as this object.
  const std::vector<Updated>& updated() const { return updated_; }
  // Says that the values of updated() have changed; the leaves are brought up to date when they are next used. No
  // collective is in progress between a step and that use.
  void changed();
  // Says that the values of slices() have been replaced.
  void replaced();
  // Advances the collectives in progress and raises the errors that they have met.
  void progress();
  // Returns the names (after `prefix`) and whole shapes of parameters, with views of this rank's part of `of`, which
  // has one vector for each of updated(); null stands for the values themselves. `written` selects what this rank
  // writes to a checkpoint; otherwise all that it holds is returned.
  std::vector<TensorSlice> slices(const std::string& prefix, const std::vector<PlacedVector>* of, bool written) const;
  // Returns a digest of all weights that are updated, which is equal on all ranks if their weights are. Collective if
  // the weights are sharded.
  std::string digest() const;
  // Returns digests of what all ranks hold alike at the end of a step, after finish_gradients() and before changed():
  // at levels 0 to 2 the weights that the model computes with, at level 0 also the values that are updated and the
  // reduced gradients. Empty at level 3, at which ranks hold different parts. Collective if weights are sharded.
  std::vector<HeldAlike> digests();

  void before_forward(size_t place) override;
  void after_forward(size_t place) override;
  void before_backward(size_t place) override;
  void after_backward(size_t place) override;

  StateBytes held() const;  // now
  const Sharding& sharding() const { return traits_.sharding; }
  // The communicator of the ranks that share one copy of the state, and that of the ranks that hold the same shard;
  // null if this rank is the only one.
  Communicator* sharers() const { return sharers_.get(); }
  Communicator* replicas() const { return replicas_.get(); }

 private:
  enum class Leaves { kOld, kComing, kThere };  // kOld: not the updated values, or not held; kComing: being gathered
  struct Unit;

  size_t unit_of(size_t place) const { return tied_ && place == output_ ? kEmbeddingPlace : place; }
  UnitRange own(size_t unit) const;
  PlacedVector values(size_t unit) const;
  void initialize_in_tier(const UnitRange& range, uint64_t seed, const Updated& updated);
  at::Tensor wide_gradients(size_t unit);
  void gather(size_t unit);
  void need(size_t unit);
  void let_go(size_t unit);
  void hold_gradients(size_t unit);
  void reduce(size_t unit);
  void finish_reduction();
  at::Tensor shard_of(size_t unit);
  void finish_between();

  Parameters& parameters_;
  const bool tied_;
  const size_t output_;  // its place
  Communicator& world_;
  const StateTraits traits_;
  TieredTensors* const tier_;
  const int shard_;
  const bool copies_;  // whether leaves have another dtype than what is updated
  const bool whole_gradients_;
  std::shared_ptr<Communicator> sharers_, replicas_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Updated> updated_;
  std::optional<size_t> reducing_;  // the unit whose gradients are being summed
  std::optional<size_t> between_;   // the unit before it, whose sums are being added between replicas
  int64_t step_ = 0;
  bool first_ = true, last_ = true;  // whether the current pass is the first or last of its step
};

}  // namespace annulus
