// SimulatedRing: all ranks' programs of a plan, run one after the other on one device. What a ring computes besides one
// whole call (smaller tiles, merges, additions of gradients) is measured so where there is one device, and without a
// transfer: what would be received is there, or handed over. Used by gpu.cc; tested against the oracle on CPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"

namespace annulus {

// Not thread-safe.
class SimulatedRing {
 public:
  // Plans, and takes the ranks' rows and all travelling keys and values from the whole tensors: q and dout
  // [B, Sq, H, D], k and v [B, Sk, Hk, D]. Raises Error(kPlan) as make_programs does, and where the tensors are not of
  // the request's shape.
  SimulatedRing(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& dout, KernelKind kernel);
  ~SimulatedRing();
  SimulatedRing(const SimulatedRing&) = delete;
  SimulatedRing& operator=(const SimulatedRing&) = delete;

  // All ranks' forward; all ranks' backward, from what the last forward left. What these do is what is measured.
  void forward();
  void backward();

  // The ranks' results as whole tensors, in the dtypes that attention returns. Of the last forward and backward.
  struct Result {
    at::Tensor out, lse, dq, dk, dv;
  };
  Result result() const;

 private:
  struct Rank;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace annulus
