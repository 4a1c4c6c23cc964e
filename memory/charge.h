// A Charge declares memory that a part of the program (optimizer, parameters, an operator of the model, attention)
// allocates, beside the code that allocates it. A training step is a sequence of such parts, and one sweep over the
// resulting lifetimes gives the peak (runtime/training/memory_plan.h). Undeclared memory fails
// tests/runtime/training/memory_plan_test.cc, which compares the plan with LibTorch's allocator. Needs no LibTorch.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace annulus {

enum class When {
  kLasts,     // for the whole job
  kKept,      // from its part's forward to the end of its backward (saved activations)
  kForward,   // while its part's forward runs, in addition to kKept (workspace)
  kBackward,  // while its part's backward runs, in addition to kKept
};

struct Charge {
  std::string_view what;  // a string literal, as is Part::name
  int64_t bytes = 0;
  When when = When::kLasts;
};

// A part of a step (an operator, attention) whose forward runs as a unit, as does its backward.
struct Part {
  std::string_view name;
  std::vector<Charge> charges;  // none of them kLasts
};

// Computes the memory over the course of a step, in bytes, from the charges of its parts.
//
// Example: parts A and B keep 10 and 20, and B's backward takes 5 more; a charge of 100 lasts. The forward holds 110,
// then 130; the backward of B holds 135, which is most(), and the backward of A 110.
//
// Not thread safe.
class StepCharges {
 public:
  // Adds a charge of kind kLasts.
  void lasts(const Charge& charge);
  // Adds the next part of the forward. The backward visits the parts in reverse order.
  void then(Part part);
  // Adds parts under activation recomputation. Their forward keeps only the kKept charges of `whole`. The backward
  // reruns their forward, which keeps their own kKept charges until the backward of each. The kBackward charges of
  // `whole` are held from the rerun to the end of the backward of `parts`.
  void then_recomputed(Part whole, std::vector<Part> parts);

  // Return the sum of the lasting charges: of all, or of those named `what`.
  int64_t lasting() const;
  int64_t lasting(std::string_view what) const;
  // Return what is kept at the end of the forward: by all charges, or by those named `what`.
  int64_t kept() const;
  int64_t kept(std::string_view what) const;
  // The peak, lasting charges included, and the part that runs at that moment: "swiglu", in its backward.
  struct Most {
    int64_t bytes = 0;
    std::string_view part;
    bool backward = false;
  };
  Most most() const;
  // Returns the peak, lasting charges included, during the backward of parts of this name; 0 if there is none.
  int64_t most_in_backward_of(std::string_view part) const;

 private:
  struct Stretch {
    Part whole;               // empty if it is not recomputed
    std::vector<Part> parts;  // one part if it is not recomputed
    bool recomputed = false;
  };
  // Returns the part that runs and the bytes held, for each moment of a step.
  std::vector<Most> moments() const;

  std::vector<Charge> lasting_;
  std::vector<Stretch> stretches_;
};

}  // namespace annulus
