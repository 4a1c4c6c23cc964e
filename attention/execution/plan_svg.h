// Draws a plan: its mask, by the rank that computes a pair and by the step at which it does, and when the ranks
// compute, send and receive by the predicted times. Used by `annulus plan --svg`. A class for one thread.
#pragma once

#include <memory>
#include <string>

#include "attention/plan/plan.h"

namespace annulus {

// The mask is that of the first batch row and query head; of long sequences each cell of a grid of at most 192 x 192
// shows what most of its pairs are. Times are those of time.h on the machine of the request's terms; of more than 8
// ranks eight are drawn, and of more than 16 steps the first 16, which the picture says. Of more than 256 ranks the
// times of the eight alone are predicted.
class PlanPicture {
 public:
  PlanPicture();
  ~PlanPicture();

  // Adds one rank's program. Call it for all ranks of a plan, in their order.
  void add(const Program& program);
  // Returns the SVG document.
  std::string svg() const;

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

}  // namespace annulus
