// A Charge is memory that a part of the program holds. It is declared beside the code that takes the memory: the
// optimizer, the parameters, the operators of the model, attention. A training step is a sequence of such parts, and
// one sweep over the resulting lifetimes gives the most that is held at once (runtime/training/memory_plan.h). Code
// that takes memory in a step without declaring it fails tests/runtime/training/memory_plan_test.cc, which compares the
// plan with LibTorch's allocator. Needs no LibTorch.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace annulus {

enum class When {
  kLasts,     // for the whole job
  kKept,      // from the forward of its part to the end of its backward
  kForward,   // while the forward of its part runs, in addition to what is kept
  kBackward,  // while the backward of its part runs, in addition to what is kept
};

struct Charge {
  std::string_view what;  // a literal, as is Part::name
  int64_t bytes = 0;
  When when = When::kLasts;
};

// A part of a step whose forward, and whose backward, runs as a whole: an operator, attention.
struct Part {
  std::string_view name;
  std::vector<Charge> charges;  // none of them kLasts
};

// Computes what a step holds from the charges of its parts. All numbers are bytes.
//
// Example: parts A and B keep 10 and 20, and B's backward takes 5 more; a charge of 100 lasts. The forward holds 110,
// then 130; the backward of B holds 135, which is most(), and that of A 110.
//
// Thread safety: not thread safe.
class StepCharges {
 public:
  // Adds a charge that lasts from step to step.
  void lasts(const Charge& charge);
  // Adds the next part of the forward. The backward runs through the parts in the reverse order.
  void then(Part part);
  // Adds parts that are recomputed: of their forward only the charges kKept of `whole` are kept. When the backward
  // reaches them, their forward runs again, and what it keeps is held until their backward. The charges kBackward of
  // `whole` are held from then to the end of their backward.
  void then_recomputed(Part whole, std::vector<Part> parts);

  // What lasts: all charges, or those named `what`.
  int64_t lasting() const;
  int64_t lasting(std::string_view what) const;
  // What is kept for the backward when the forward has ended: all charges, or those named `what`.
  int64_t kept() const;
  int64_t kept(std::string_view what) const;
  // The most that is held at once, including what lasts, and the part that runs at that moment: "swiglu", in its
  // backward.
  struct Most {
    int64_t bytes = 0;
    std::string_view part;
    bool backward = false;
  };
  Most most() const;
  // The most that is held in the backward of parts of this name, including what lasts; 0 if there is no such part.
  int64_t most_in_backward_of(std::string_view part) const;

 private:
  struct Stretch {
    Part whole;               // empty if it is not recomputed
    std::vector<Part> parts;  // one part if it is not recomputed
    bool recomputed = false;
  };
  // For each moment of a step, the part that runs and the bytes that are held.
  std::vector<Most> moments() const;

  std::vector<Charge> lasting_;
  std::vector<Stretch> stretches_;
};

}  // namespace annulus
