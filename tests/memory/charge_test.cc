// Tests that the memory of a step follows from what its parts declare for each phase.
#include "memory/charge.h"

#include <gtest/gtest.h>

namespace annulus::charge_test {
namespace {

Part part(std::string_view name, int64_t kept, int64_t forward, int64_t backward) {
  return {name, {{"kept", kept, When::kKept}, {"made", forward, When::kForward}, {"made", backward, When::kBackward}}};
}

TEST(StepCharges, BackwardReleasesKeptBytesPartByPart) {
  StepCharges step;
  step.lasts({"weights", 1000, When::kLasts});
  step.lasts({"tables", 10, When::kLasts});
  step.then(part("a", 100, 1, 5));
  step.then(part("b", 200, 2, 500));
  step.then(part("c", 400, 3, 50));
  EXPECT_EQ(step.lasting(), 1010);
  EXPECT_EQ(step.lasting("tables"), 10);
  EXPECT_EQ(step.lasting("others"), 0);
  EXPECT_EQ(step.kept(), 700);
  EXPECT_EQ(step.most_in_backward_of("c"), 1010 + 700 + 50);
  EXPECT_EQ(step.most_in_backward_of("b"), 1010 + 300 + 500);
  EXPECT_EQ(step.most_in_backward_of("a"), 1010 + 100 + 5);
  const StepCharges::Most most = step.most();
  EXPECT_EQ(most.bytes, 1010 + 300 + 500);  // the kept bytes of c are released
  EXPECT_EQ(most.part, "b");
  EXPECT_TRUE(most.backward);
}

TEST(StepCharges, PeakMayBeInTheForward) {
  StepCharges step;
  step.then(part("a", 10, 0, 0));
  step.then(part("loss", 1, 100, 0));
  EXPECT_EQ(step.most().bytes, 111);
  EXPECT_EQ(step.most().part, "loss");
  EXPECT_FALSE(step.most().backward);
}

// What a layer offloads is on the device while it runs, and beside its neighbour: on its way out and back.
TEST(StepCharges, OffloadedBytesLeaveBesideTheNextLayer) {
  StepCharges step;
  step.then_offloaded({part("a", 100, 1, 5), part("b", 200, 2, 40)});
  step.then_offloaded({part("c", 1000, 0, 20), part("d", 2000, 3, 0)});
  step.then(part("weights", 7, 0, 0));
  step.then_all({part("e", 10000, 0, 60), part("f", 20000, 0, 0)});
  step.then(part("loss", 0, 100, 0));
  EXPECT_EQ(step.kept(), 30007);
  EXPECT_EQ(step.kept("kept"), 30007);
  EXPECT_EQ(step.offloaded(), 3300);
  EXPECT_EQ(step.most().bytes, 7 + 30000 + 3000);  // f's forward, beside c and d on their way out
  EXPECT_EQ(step.most_in_backward_of("loss"), 30007);
  EXPECT_EQ(step.most_in_backward_of("e"), 7 + 10000 + 60 + 3000);  // beside c and d on their way back
  EXPECT_EQ(step.most_in_backward_of("c"), 1000 + 20 + 300);
  EXPECT_EQ(step.most_in_backward_of("a"), 100 + 5);
}

TEST(StepCharges, WhatStaysIsNotOffloaded) {
  StepCharges step;
  Part b = part("b", 200, 2, 40);
  b.charges.push_back({"weights", 7, When::kStays});
  step.then_offloaded({part("a", 100, 1, 5), b});
  step.then_all({part("c", 1000, 0, 0), part("d", 0, 0, 0)});
  step.then(part("loss", 0, 100, 0));
  EXPECT_EQ(step.kept(), 1007);
  EXPECT_EQ(step.kept("weights"), 7);
  EXPECT_EQ(step.offloaded(), 300);
  EXPECT_EQ(step.most_in_backward_of("loss"), 1007);
  EXPECT_EQ(step.most_in_backward_of("b"), 300 + 7 + 40);
  EXPECT_EQ(step.most_in_backward_of("a"), 100 + 5);  // from the end of b's backward
}

TEST(StepCharges, WithoutPartsOnlyLastingBytesCount) {
  EXPECT_EQ(StepCharges().most().bytes, 0);
  StepCharges step;
  step.lasts({"weights", 5, When::kLasts});
  EXPECT_EQ(step.most().bytes, 5);
  EXPECT_EQ(step.most_in_backward_of("a"), 0);
}

}  // namespace
}  // namespace annulus::charge_test
