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
  kStays,     // as kKept, but never offloaded
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
  void then_all(std::vector<Part> parts);
  // Adds parts whose kKept charges are offloaded (memory/tiers/offload.h). They leave the device while the next several
  // parts that are added together run, and return while the backward of those runs.
  void then_offloaded(std::vector<Part> parts);

  // Return the sum of the lasting charges: of all, or of those named `what`.
  int64_t lasting() const;
  int64_t lasting(std::string_view what) const;
  // Return what the device keeps at the end of the forward: by all charges, or by those named `what`.
  int64_t kept() const;
  int64_t kept(std::string_view what) const;
  // Returns the bytes that are offloaded when the forward has ended, with those of each charge replaced by `taken` of
  // them if it is given.
  int64_t offloaded(int64_t (*taken)(int64_t bytes) = nullptr) const;
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
  // Parts that are added together.
  struct Group {
    std::vector<Part> parts;
    bool offloaded = false;
  };
  // Returns the part that runs and the bytes held, for each moment of a step.
  std::vector<Most> moments() const;

  std::vector<Charge> lasting_;
  std::vector<Group> groups_;
};

}  // namespace annulus
