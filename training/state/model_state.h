// What is trained, on one rank: the weights that are updated, their gradients, and the copies that the model computes
// with, each whole or a shard of it (sharding.h); the collectives that bring gradients together while the backward runs
// and weights to their layers ahead of time. Used by training.cc.
//
// At every level the same numbers are made in the same order: gradients are summed by reduce_scatter, and those of
// level 0 gathered behind it, the squares of each shard are added up on their own, and an update is one of elements. So
// at one world all levels have the same bits.
//
// Collective: every rank of the world calls the same functions in the same order. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "model/model.h"
#include "training/run/tensor_slice.h"
#include "training/state/optimizer.h"
#include "training/state/sharding.h"

namespace annulus {

class ModelState final : public WeightUse {
 public:
  // Fills the weights from `seed`. The model, made without weights for as many parts as there are shards, and the world
  // must outlive this. Where steps are not recorded the model tells this of its use of the weights.
  ModelState(Model& model, Communicator& world, const StateTraits& traits, uint64_t seed);
  ~ModelState() override;

  // A step: passes forward and backward, each between begin_pass and end_pass; then squares and finish_gradients, and
  // where the weights are to change the optimizer's update of updated(), and changed(). `step`: its number, for
  // messages; `first`, `last`: whether this is the step's first pass, its last.
  void begin_pass(int64_t step, bool first, bool last);
  void end_pass();
  // The sum of the squares of this rank's shard of the gradients: fp64 [], of fixed chunks one after the other.
  at::Tensor squares() const;
  void finish_gradients();
  // Before a forward outside a step.
  void begin_forward();
  // Of what this rank updates, unit by unit: views that stay.
  const std::vector<Updated>& updated() const { return updated_; }
  // The values of updated() are others: the leaves follow when they are next used. Between a step and the next use no
  // collective is under way.
  void changed();
  // Moves what is under way along, and raises what it has met.
  void progress();
  // Names and whole shapes of parameters with this rank's part of `of`, vectors beside updated() (null: the values
  // themselves). `written`: what this rank writes of a checkpoint; else all that it holds.
  std::vector<TensorSlice> slices(const std::string& prefix, const std::vector<at::Tensor>* of, bool written) const;
  // Of all weights that are updated: the same text on every rank that holds the same. Where they are cut, a collective.
  std::string digest() const;

  void before_forward(size_t place) override;
  void after_forward(size_t place) override;
  void before_backward(size_t place) override;
  void after_backward(size_t place) override;

  const Sharding& sharding() const { return traits_.sharding; }
  // Among the ranks that share the state, and between those that hold the same shard; null where there is one.
  Communicator* sharers() const { return sharers_.get(); }
  Communicator* replicas() const { return replicas_.get(); }

 private:
  enum class Leaves { kOld, kComing, kThere };  // old: not the updated values, or not held
  struct Unit;

  size_t unit_of(size_t place) const { return tied_ && place == output_ ? 0 : place; }
  UnitRange own(size_t unit) const;
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
  const size_t last_layer_, output_;  // places
  Communicator& world_;
  const StateTraits traits_;
  const int shard_;
  const bool copies_;  // leaves are of another dtype than what is updated
  const bool whole_gradients_;
  std::shared_ptr<Communicator> sharers_, replicas_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Updated> updated_;
  std::optional<size_t> reducing_;  // the unit whose gradients are being summed
  std::optional<size_t> between_;   // and the one before, whose sums are added between hosts
  int64_t step_ = 0;
  bool first_ = true, last_ = true;  // of the step's passes, the current one
};

}  // namespace annulus
