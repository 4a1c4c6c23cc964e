// Charge: what a part of the program holds in memory, declared beside the code that takes it: by the optimizer, the
// parameters, the model's operators, the attention. A training step is a sequence of such parts; one sweep over the
// lifetimes that follow from it says what is held at most (training/memory_plan.h). Who takes memory in a step and
// declares nothing fails tests/training/memory_plan_test.cc, which compares with LibTorch's allocator. Needs no
// LibTorch.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

namespace annulus {

enum class When {
  kLasts,     // as long as the job
  kKept,      // from the forward of its part to the end of its backward
  kForward,   // while the forward of its part runs, besides what is kept
  kBackward,  // while the backward of its part runs, besides what is kept
};

struct Charge {
  std::string_view what;  // literals, here and in Part
  int64_t bytes = 0;
  When when = When::kLasts;
};

// A stretch of a step that runs as one, and backwards as one: an operator, an attention.
struct Part {
  std::string_view name;
  std::vector<Charge> charges;  // none that lasts
};

// What a step holds, by the charges of its parts. Not thread-safe.
class StepCharges {
 public:
  // Of what lasts from step to step.
  void lasts(const Charge& charge);
  // The next part of the forward; the backward runs through the parts the other way round.
  void then(Part part);
  // The next parts, of which nothing is kept but what `whole` keeps: when the backward comes to them, their forward
  // runs again, and what it keeps is there until their backward. `whole` is working from then to the end of it.
  void then_recomputed(Part whole, std::vector<Part> parts);

  // Bytes of what lasts, of all charges or of one.
  int64_t lasting() const;
  int64_t lasting(std::string_view what) const;
  // Kept for the backward when the forward has ended, by all charges or by one.
  int64_t kept() const;
  int64_t kept(std::string_view what) const;
  // Held at most at once, what lasts included, and in which part: "swiglu, backward".
  struct Most {
    int64_t bytes = 0;
    std::string_view part;
    bool backward = false;
  };
  Most most() const;
  // Held at most in the backward of parts of this name, what lasts included; 0 where there is none.
  int64_t most_in_backward_of(std::string_view part) const;

 private:
  struct Stretch {
    Part whole;               // of a recomputed one
    std::vector<Part> parts;  // otherwise one
    bool recomputed = false;
  };
  // Of each moment of a step, the part that runs and what is held then.
  std::vector<Most> moments() const;

  std::vector<Charge> lasting_;
  std::vector<Stretch> stretches_;
};

}  // namespace annulus
