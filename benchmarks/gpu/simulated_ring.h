// SimulatedRing runs the programs of all ranks of a plan one after the other on one device. So one device can measure
// what a ring computes beyond one whole call: smaller tiles, merges and additions of gradients. There are no transfers:
// keys and values are in place from the start, and gradients are handed from rank to rank. Used by gpu.cc;
// tests/benchmarks/simulated_ring_test.cc compares it with the oracle on CPUs, and no GPU has run it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"

namespace annulus {

// Not thread safe.
class SimulatedRing {
 public:
  // Makes the plan and copies the rows of each rank, and all keys and values that would be sent, from the whole
  // tensors: q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D]. Raises Error(kPlan) as make_programs does, and if the
  // tensors do not have the request's shape.
  SimulatedRing(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const at::Tensor& dout, KernelKind kernel);
  ~SimulatedRing();
  SimulatedRing(const SimulatedRing&) = delete;
  SimulatedRing& operator=(const SimulatedRing&) = delete;

  // The forward of all ranks, and the backward of all ranks, which uses the results of the last forward. Only the work
  // in these two functions is measured.
  void forward();
  void backward();

  // The results of the last forward and backward as whole tensors, in the dtypes that attention returns: out and dq
  // [B, Sq, H, D], lse [B, H, Sq], dk and dv [B, Sk, Hk, D].
  struct Result {
    at::Tensor out, lse, dq, dk, dv;
  };
  Result result() const;

 private:
  struct Rank;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace annulus
