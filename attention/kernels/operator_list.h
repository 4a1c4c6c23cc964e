// Dispatches a call to one of several attention operators, and records the operators' history in a process: the calls
// of each, the shapes prepared, and those refused. Used by attention/kernels/composed_kernel.cc; tests read which
// operator computed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/kernels/attention_operator.h"

namespace annulus {

// The history of a process's operators. Thread safe.
class OperatorHistory {
 public:
  // The number of shapes for which an operator may prepare a plan. Documents and selected blocks bring new shapes with
  // every step, and would wait for plans that are used only once.
  static constexpr int64_t kMostPrepared = 64;

  static OperatorHistory& of_process();

  explicit OperatorHistory(int64_t most_prepared = kMostPrepared) : most_prepared_(most_prepared) {}

  // Sets the number of shapes that each operator may prepare; for tests.
  void set_most_prepared(int64_t shapes);

  // Returns the number of calls, forwards and backwards, that each operator has computed, by name.
  std::map<std::string, int64_t> calls() const;
  // Returns a text for each shape that an operator has refused, with the reason.
  std::vector<std::string> refusals() const;

 private:
  friend class OperatorList;

  // Batch rows, queries, heads, keys, kv heads, head size, dtype, and whether the band is causal. Strides are omitted,
  // so a shape refused with some strides is not tried with others.
  using Shape = std::array<int64_t, 8>;
  using Refusal = std::tuple<std::string, Shape, bool>;  // operator, shape, whether backward

  void count(const std::string& name);
  // Returns whether the operator has prepared this shape or may do so now, which uses up one of most_prepared_.
  bool may_prepare(const std::string& name, const Shape& shape);
  bool refused(const std::string& name, const Shape& shape, bool backward) const;
  void refuse(const std::string& name, const Shape& shape, bool backward, const std::string& reason);
  // Returns whether this is the first call that skips the operator because all its shapes are taken.
  bool passes_over_first(const std::string& name);

  mutable std::mutex mutex_;
  int64_t most_prepared_;
  std::map<std::string, int64_t> calls_;
  std::map<std::string, std::set<Shape>> prepared_;
  std::map<Refusal, std::string> refusals_;
  std::set<std::string> passed_over_;
};

// Operators in order of preference. A call goes to the first that takes it. An operator that prepares shapes takes a
// call only if it has or may prepare a plan for the shape (OperatorHistory) and the call is not gathered, because the
// shapes of gathered calls keep changing; a warning is logged once when its limit is reached. If only such operators
// remain, the last of them takes the call.
//
// A c10::Error from an operator that prepares shapes is a refusal of the shape in this direction: a warning is logged,
// the next operator computes, and the operator never gets the shape again in this process. LibTorch's cuDNN operator
// would crash, because it caches a null plan for a shape that cuDNN has refused (aten/src/ATen/native/cudnn/MHA.cpp).
// Out-of-memory errors, including cuDNN's, and device errors are no refusals and propagate, as do all errors of other
// operators.
//
// Thread safe.
class OperatorList {
 public:
  // `history` must outlive the list.
  explicit OperatorList(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                        OperatorHistory& history = OperatorHistory::of_process());

  bool any_band() const;  // whether some operator supports any band
  // Returns the bytes that backward() takes besides its results: the maximum over all operators if `any` of them may
  // compute, else those of the first.
  int64_t backward_bytes(const OperatorSize& size, bool any) const;

  // As in AttentionOperator. Raise Error(kInternal) if no operator takes the call, and Error(kUnavailable) if all that
  // do have refused its shape.
  AttentionOperator::Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                                     double scale, bool gathered) const;
  AttentionOperator::Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                       const Band& band, double scale, bool gathered) const;

 private:
  struct Call {
    const at::Tensor &q, &k;
    const Band& band;
    bool gathered, backward;

    OperatorHistory::Shape shape() const;
  };
  const AttentionOperator& choose(const Call& call) const;
  template <typename Compute>
  auto compute(const Call& call, const Compute& run) const;

  const std::vector<std::shared_ptr<const AttentionOperator>> operators_;
  OperatorHistory& history_;
};

}  // namespace annulus
