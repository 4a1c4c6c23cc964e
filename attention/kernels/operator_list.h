// Chooses which of several attention operators computes a call, and remembers what a process's operators did: the calls
// of each, the shapes that were prepared, and those that were refused. Used by attention/kernels/composed_kernel.cc;
// tests read from it which operator really computed.
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

// What the operators of a process have done so far. Thread safe.
class OperatorHistory {
 public:
  // The most shapes for which an operator may prepare a plan. Documents and selected blocks bring new shapes with every
  // step, and would wait for plans that are used once.
  static constexpr int64_t kMostPrepared = 64;

  static OperatorHistory& of_process();

  explicit OperatorHistory(int64_t most_prepared = kMostPrepared) : most_prepared_(most_prepared) {}

  // Lets each operator prepare this many shapes in total. Tests that need an operator at many shapes raise the number.
  void set_most_prepared(int64_t shapes);

  // The number of calls, forwards and backwards, that each operator has computed, by its name.
  std::map<std::string, int64_t> calls() const;
  // A text for each shape that an operator has refused, with the operator's reason.
  std::vector<std::string> refusals() const;

 private:
  friend class OperatorList;

  // Batch rows, queries, heads, keys, kv heads, head size, dtype, and whether the band is causal. Strides are left out,
  // so a shape that was refused with some strides is not tried with others.
  using Shape = std::array<int64_t, 8>;
  using Refusal = std::tuple<std::string, Shape, bool>;  // the operator's name, the shape, whether a backward

  void count(const std::string& name);
  // Whether the operator has prepared this shape or may do so now, which takes one of its places.
  bool may_prepare(const std::string& name, const Shape& shape);
  bool refused(const std::string& name, const Shape& shape, bool backward) const;
  void refuse(const std::string& name, const Shape& shape, bool backward, const std::string& reason);
  // Whether this is the first time that a call passes over the operator because it has no place left.
  bool passes_over_first(const std::string& name);

  mutable std::mutex mutex_;
  int64_t most_prepared_;
  std::map<std::string, int64_t> calls_;
  std::map<std::string, std::set<Shape>> prepared_;
  std::map<Refusal, std::string> refusals_;
  std::set<std::string> passed_over_;
};

// Operators in order of preference. A call goes to the first one that takes it. An operator that prepares shapes takes
// a call only if it has or may make a plan for its shape (OperatorHistory) and the call is not gathered, because
// gathered calls come in ever new shapes; when its places are taken, a warning says so once. If only such operators
// remain, the last of them takes the call.
//
// If an operator that prepares shapes raises c10::Error, it refuses the shape in this direction: a warning says so, the
// next operator computes, and the operator is never given the shape again in this process. LibTorch's cuDNN operator
// would crash, because it keeps a null plan for a shape that cuDNN has refused (aten/src/ATen/native/cudnn/MHA.cpp).
// Errors of memory, those of cuDNN among them, and of the device are no refusals and are passed on, as are all errors
// of other operators.
//
// Thread safe.
class OperatorList {
 public:
  // `history` must outlive the list.
  explicit OperatorList(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                        OperatorHistory& history = OperatorHistory::of_process());

  bool any_band() const;  // whether some operator takes any band
  // The bytes that backward() takes besides its results: the most of all operators if `any` may compute, else those of
  // the first one.
  int64_t backward_bytes(const OperatorSize& size, bool any) const;

  // As those of AttentionOperator. Raise Error(kInternal) if no operator takes the call, and Error(kUnavailable) if all
  // that would take it have refused its shape.
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
