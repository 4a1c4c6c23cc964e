// See model_state.h.
#include "runtime/training/state/model_state.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <utility>

#include "common/checksum.h"
#include "memory/pool/pool_tensor.h"
#include "memory/storage_bytes.h"
#include "runtime/training/state/parameter_groups.h"

namespace annulus {
namespace {

// The number of elements in a chunk whose squares are summed separately.
constexpr int64_t kChunk = int64_t{1} << 14;
// The number of elements that a digest reads at a time.
constexpr int64_t kRead = int64_t{1} << 22;

// The squares of fp32 numbers are exact in fp64, so a fused multiply-add gives the same bits as two instructions.
template <typename T>
double squares_of_chunk(const T* p, int64_t n) {
  std::array<double, 16> sums{};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (size_t lane = 0; lane < 16; ++lane) {
      const auto x = static_cast<double>(p[i + static_cast<int64_t>(lane)]);
      sums[lane] += x * x;
    }
  }
  double sum = 0;
  for (const double lane : sums) sum += lane;
  for (; i < n; ++i) sum += static_cast<double>(p[i]) * static_cast<double>(p[i]);
  return sum;
}

template <typename T>
double squares_on_cpu(const at::Tensor& x) {
  const int64_t n = x.numel(), chunks = (n + kChunk - 1) / kChunk;
  std::vector<double> sums(static_cast<size_t>(chunks));
  const T* p = x.const_data_ptr<T>();
  at::parallel_for(0, chunks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      sums[static_cast<size_t>(c)] = squares_of_chunk(p + c * kChunk, std::min(kChunk, n - c * kChunk));
    }
  });
  double sum = 0;
  for (const double chunk : sums) sum += chunk;
  return sum;
}

at::Tensor squares_of(const at::Tensor& x) {
  at::Tensor sum = at::zeros({}, x.options().dtype(at::kDouble));
  if (x.is_cpu()) {
    return sum.fill_(x.scalar_type() == at::kDouble ? squares_on_cpu<double>(x) : squares_on_cpu<float>(x));
  }
  // On a GPU the norm of each chunk is computed in x's dtype, which reads x once, and their squares are summed in fp64.
  const int64_t whole = x.numel() / kChunk * kChunk;
  const auto add = [&](const at::Tensor& chunks) {
    sum.add_(at::linalg_vector_norm(chunks, 2, at::IntArrayRef{1}).to(at::kDouble).square().sum());
  };
  if (whole > 0) add(x.narrow(0, 0, whole).view({-1, kChunk}));
  if (whole < x.numel()) add(x.narrow(0, whole, x.numel() - whole).unsqueeze(0));
  return sum;
}

}  // namespace

struct ModelState::Unit {
  const ParameterUnit& is;
  std::string gathering, summing, gathering_gradients;  // the names of its collectives in messages
  Leaves leaves = Leaves::kOld;
  std::unique_ptr<Work> coming = nullptr;    // the all_gather of the leaves
  at::Tensor wide = {};                      // the sums of gradients, if the leaves have another dtype
  at::Tensor shard = {};                     // the reduced shard of the gradients, if the whole is not kept
  bool gradients_begun = false;              // whether memory for gradients has been taken in this pass
  std::unique_ptr<Work> reducing = nullptr;  // the reduce_scatter of the gradients
  std::unique_ptr<Work> between = nullptr;   // the all_reduce of this rank's shard of them over the replicas
  std::unique_ptr<Work> whole = nullptr;     // the all_gather of the reduced gradients at level 0
};

ModelState::ModelState(Model& model, Communicator& world, const StateTraits& traits, uint64_t seed, TieredTensors* tier)
    : parameters_(model.parameters()),
      tied_(model.shape().tie_embeddings),
      output_(output_place(model.shape().layers)),
      world_(world),
      traits_(traits),
      tier_(tier),
      shard_(traits.sharding.shard_of(world.rank())),
      copies_(!traits.inference && at::toOpMathType(traits.dtype) != traits.dtype),
      whole_gradients_(traits.sharding.whole_gradients(traits.accumulate)) {
  const Sharding& s = traits_.sharding;
  if (s.shards > 1) sharers_ = world.split(s.replica_of(world.rank()), world.rank());
  if (s.replicas > 1) replicas_ = world.split(s.shard_of(world.rank()), world.rank());
  const at::TensorOptions wide =
      at::TensorOptions(traits.inference ? traits.dtype : at::toOpMathType(traits.dtype)).device(parameters_.device());
  const bool gathered = s.level == 3;
  const std::vector<Rates> rates = parameter_rates(parameters_, traits.weight_decay, traits.groups);
  for (size_t unit = 0; unit < parameters_.units().size(); ++unit) {
    const ParameterUnit& is = parameters_.units()[unit];
    units_.push_back(std::make_unique<Unit>(Unit{.is = is,
                                                 .gathering = "gathering the weights of " + is.name,
                                                 .summing = "summing the gradients of " + is.name,
                                                 .gathering_gradients = "gathering the gradients of " + is.name}));
    Unit& u = *units_.back();
    const UnitRange range = own(unit);
    ReleasableTensor& values = parameters_.values(unit);
    ReleasableTensor& gradients = parameters_.gradients(unit);
    if (!gathered) values.take();
    Updated updated;
    if (copies_ && tier_ != nullptr) {
      // At level 3 the leaves are released between their uses, so the shard that is gathered has memory of its own.
      updated.leaves = gathered ? at::empty({range.count()}, wide.dtype(traits_.dtype))
                                : values.tensor().narrow(0, range.begin, range.count());
      updated.in_tier = tier_->add(range.count());
      initialize_in_tier(range, seed, updated);
    } else {
      updated.values = copies_ || gathered ? at::empty({range.count()}, wide)
                                           : values.tensor().narrow(0, range.begin, range.count());
      if (traits.inference) {
        updated.values.zero_();
      } else {
        parameters_.initialize(seed, unit, range.begin, updated.values);
      }
    }
    if (!copies_ && s.level == 0) u.leaves = Leaves::kThere;
    if (traits.inference) {
      updated_.push_back(std::move(updated));
      continue;
    }
    if (copies_ ? traits_.recorded : whole_gradients_) gradients.take();
    if (copies_ && whole_gradients_) u.wide = at::zeros({is.elements}, wide);
    if (!whole_gradients_) u.shard = at::zeros({range.count()}, wide);
    updated.gradients = whole_gradients_ ? wide_gradients(unit).narrow(0, range.begin, range.count()) : u.shard;
    if (!copies_ && whole_gradients_) at::Tensor(gradients.tensor()).zero_();
    updated.rated = rated_ranges(parameters_, rates, range);
    updated_.push_back(std::move(updated));
  }
  if (!traits_.recorded) model.set_use(this);
}

ModelState::~ModelState() = default;

// Returns the elements of a unit that this rank updates.
UnitRange ModelState::own(size_t unit) const {
  const int64_t elements = parameters_.units()[unit].elements;
  if (traits_.sharding.level == 0) return {unit, 0, elements};
  const int64_t each = elements / traits_.sharding.shards;
  return {unit, shard_ * each, (shard_ + 1) * each};
}

// Returns the values that this rank updates, wherever they lie.
PlacedVector ModelState::values(size_t unit) const {
  const Updated& updated = updated_[unit];
  if (!updated.in_tier) return {.tensor = updated.values};
  return {.tier = tier_, .vector = *updated.in_tier, .count = updated.gradients.numel()};
}

void ModelState::initialize_in_tier(const UnitRange& range, uint64_t seed, const Updated& updated) {
  for (int64_t at = 0; at < range.count(); at += tier_->chunk()) {
    const int64_t n = std::min(tier_->chunk(), range.count() - at);
    const at::Tensor values = at::empty({n}, at::toOpMathType(traits_.dtype));
    parameters_.initialize(seed, range.unit, range.begin + at, values);
    tier_->write(*updated.in_tier, at, values);
    updated.leaves.narrow(0, at, n).copy_(values);
  }
}

at::Tensor ModelState::wide_gradients(size_t unit) {
  return copies_ ? units_[unit]->wide : parameters_.gradients(unit).tensor();
}

void ModelState::gather(size_t unit) {
  Unit& u = *units_[unit];
  if (u.leaves != Leaves::kOld) return;
  ReleasableTensor& values = parameters_.values(unit);
  values.take();
  const UnitRange range = own(unit);
  const at::Tensor mine = values.tensor().narrow(0, range.begin, range.count());
  const at::Tensor& from = updated_[unit].in_tier ? updated_[unit].leaves : updated_[unit].values;
  if (!mine.is_alias_of(from)) at::Tensor(mine).copy_(from);
  u.leaves = Leaves::kThere;
  if (traits_.sharding.level == 0) return;
  u.coming = sharers_->begin_all_gather(values.tensor().view({traits_.sharding.shards, -1}), mine,
                                        {u.gathering, step_, "step"});
  u.leaves = Leaves::kComing;
}

void ModelState::need(size_t unit) {
  gather(unit);
  Unit& u = *units_[unit];
  if (u.leaves != Leaves::kComing) return;
  std::exchange(u.coming, nullptr)->wait();
  u.leaves = Leaves::kThere;
}

// Frees the memory of a unit's leaves if they are sharded.
void ModelState::let_go(size_t unit) {
  if (traits_.sharding.level < 3 || units_[unit]->leaves == Leaves::kOld) return;
  need(unit);  // a gather in progress must not write to freed memory
  parameters_.values(unit).release();
  units_[unit]->leaves = Leaves::kOld;
}

void ModelState::before_forward(size_t place) {
  need(unit_of(place));
  if (place < output_) gather(unit_of(place + 1));
}

void ModelState::after_forward(size_t place) {
  if (c10::GradMode::is_enabled() && place + 1 == output_) return;  // the backward reads it first
  let_go(unit_of(place));
}

void ModelState::before_backward(size_t place) {
  hold_gradients(unit_of(place));
  if (place == kEmbeddingPlace || place == output_) return;  // the backward of these reads no gathered weights
  need(unit_of(place));
  if (place > 1) gather(unit_of(place - 1));
}

void ModelState::after_backward(size_t place) {
  if (tied_ && place == output_) return;
  const size_t unit = unit_of(place);
  Unit& u = *units_[unit];
  ReleasableTensor& leaves = parameters_.gradients(unit);
  let_go(unit);
  u.gradients_begun = false;
  if (last_) finish_reduction();  // that of the following place, before more memory is taken
  if (copies_) {
    if (!u.wide.defined()) {
      const at::TensorOptions wide = leaves.tensor().options().dtype(at::toOpMathType(traits_.dtype));
      u.wide = pool_tensor(leaves.tensor().sizes(), wide, PoolPurpose::kGradients).copy_(leaves.tensor());
    } else if (first_) {
      u.wide.copy_(leaves.tensor());
    } else {
      u.wide.add_(leaves.tensor());
    }
    if (!traits_.recorded) leaves.release();
  }
  if (last_) reduce(unit);
}

// Takes memory for gradients once in a pass, so that what a tied output has added to the embedding's remains.
void ModelState::hold_gradients(size_t unit) {
  Unit& u = *units_[unit];
  if (std::exchange(u.gradients_begun, true)) return;
  ReleasableTensor& leaves = parameters_.gradients(unit);
  leaves.take();
  // Without copies, gradients accumulate in the leaves' gradients from pass to pass.
  if (first_ || copies_) at::Tensor(leaves.tensor()).zero_();
}

void ModelState::reduce(size_t unit) {
  Unit& u = *units_[unit];
  reducing_ = unit;
  if (!sharers_) return;
  const at::Tensor in = wide_gradients(unit).view({traits_.sharding.shards, -1});
  const at::Tensor out = u.shard.defined() ? u.shard : in[shard_];
  u.reducing = sharers_->begin_reduce_scatter(out, in, {u.summing, step_, "step"});
}

void ModelState::finish_reduction() {
  if (!reducing_) return;
  const size_t unit = *std::exchange(reducing_, std::nullopt);
  Unit& u = *units_[unit];
  if (u.reducing) std::exchange(u.reducing, nullptr)->wait();
  if (!whole_gradients_) {
    copies_ ? u.wide.reset() : parameters_.gradients(unit).release();
  }
  finish_between();
  if (replicas_) u.between = replicas_->begin_all_reduce(shard_of(unit), ReduceOp::kSum, {u.summing, step_, "step"});
  between_ = unit;
  if (!replicas_) finish_between();
}

// Returns the shard of the gradients that is reduced on this rank.
at::Tensor ModelState::shard_of(size_t unit) {
  const Unit& u = *units_[unit];
  return u.shard.defined() ? u.shard : wide_gradients(unit).view({traits_.sharding.shards, -1})[shard_];
}

void ModelState::finish_between() {
  if (!between_) return;
  const size_t unit = *std::exchange(between_, std::nullopt);
  Unit& u = *units_[unit];
  if (u.between) std::exchange(u.between, nullptr)->wait();
  if (sharers_ && traits_.sharding.level == 0) {
    u.whole = sharers_->begin_all_gather(wide_gradients(unit).view({traits_.sharding.shards, -1}), shard_of(unit),
                                         {u.gathering_gradients, step_, "step"});
  }
}

StateBytes ModelState::held() const {
  StorageBytes weights, gradients;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    weights.add(parameters_.values(unit).tensor());
    weights.add(updated_[unit].values);
    weights.add(updated_[unit].leaves);
    gradients.add(parameters_.gradients(unit).tensor());
    gradients.add(units_[unit]->wide);
    gradients.add(units_[unit]->shard);
  }
  return {weights.bytes(), gradients.bytes()};
}

void ModelState::begin_pass(int64_t step, bool first, bool last) {
  step_ = step;
  first_ = first;
  last_ = last;
  begin_forward();
  if (!traits_.recorded) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) hold_gradients(unit);
}

// A model whose steps are recorded does not call this object, so all leaves are gathered in advance.
void ModelState::begin_forward() {
  if (!traits_.recorded) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) need(unit);
}

void ModelState::end_pass() {
  if (traits_.recorded) {
    for (size_t unit = units_.size() - 1; unit > 0; --unit) after_backward(unit);
  }
  after_backward(0);
  finish_reduction();
  finish_between();
}

void ModelState::finish_gradients() {
  for (const auto& u : units_) {
    if (u->whole) std::exchange(u->whole, nullptr)->wait();
  }
}

at::Tensor ModelState::squares() const {
  at::Tensor sum;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    at::Tensor mine = updated_[unit].gradients;
    if (traits_.sharding.level == 0) mine = mine.view({traits_.sharding.shards, -1})[shard_];
    sum = sum.defined() ? sum.add_(squares_of(mine)) : squares_of(mine);
  }
  return sum;
}

void ModelState::changed() {
  if (traits_.sharding.level == 0 && !copies_) return;
  for (const auto& u : units_) u->leaves = Leaves::kOld;
}

void ModelState::replaced() {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const Updated& updated = updated_[unit];
    if (!updated.in_tier) continue;
    for (int64_t at = 0; at < updated.leaves.numel(); at += tier_->chunk()) {
      const int64_t n = std::min(tier_->chunk(), updated.leaves.numel() - at);
      updated.leaves.narrow(0, at, n).copy_(tier_->read(*updated.in_tier, at, n));
    }
  }
  changed();
}

void ModelState::progress() {
  for (Communicator* comm : {sharers_.get(), replicas_.get()}) {
    if (comm != nullptr) comm->progress();
  }
}

std::vector<TensorSlice> ModelState::slices(const std::string& prefix, const std::vector<PlacedVector>* of,
                                            bool written) const {
  std::vector<TensorSlice> slices;
  if (written && traits_.sharding.replica_of(world_.rank()) > 0) return slices;
  const std::vector<UnitRange> shard = shard_ranges(parameters_, traits_.sharding.shards, shard_);
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const UnitRange held = own(unit), range = written ? shard[unit] : held;
    const PlacedVector all = of != nullptr ? (*of)[unit] : values(unit);
    for (size_t i = units_[unit]->is.first; i < units_[unit]->is.last; ++i) {
      const ParameterInfo& p = parameters_.list()[i];
      const int64_t begin = std::max(range.begin, p.offset), end = std::min(range.end, p.offset + p.count());
      if (begin >= end) continue;
      const PlacedVector part = all.narrow(begin - held.begin, end - begin);
      slices.push_back({.name = prefix + p.name,
                        .shape = p.shape,
                        .begin = begin - p.offset,
                        .values = part.tensor,
                        .in_tier = part.tier != nullptr ? part : PlacedVector{}});
    }
  }
  return slices;
}

std::string ModelState::digest() const {
  const Sharding& s = traits_.sharding;
  const auto of_shard = [&](int shard) {
    std::string text;
    for (const UnitRange& range : shard_ranges(parameters_, s.shards, shard)) {
      const PlacedVector part = values(range.unit).narrow(range.begin - own(range.unit).begin, range.count());
      Checksum sum;
      for (int64_t at = 0; at < part.numel(); at += kRead) {
        const at::Tensor read = part.read(at, std::min(kRead, part.numel() - at));
        sum.update(read.const_data_ptr(), read.nbytes());
      }
      text += sum.hex();
    }
    return checksum(text.data(), text.size());
  };
  std::string all;
  if (s.level == 0) {
    for (int shard = 0; shard < s.shards; ++shard) all += of_shard(shard);
  } else {
    for (const std::string& one :
         all_gather_text(*sharers_, of_shard(shard_), {"comparing the weights", step_, "step"})) {
      all += one;
    }
  }
  return checksum(all.data(), all.size());
}

}  // namespace annulus
