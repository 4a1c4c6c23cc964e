// Tests of what the schedules send that move queries: ulysses, ulysses-ring and mesh. That they compute the pattern's
// pairs is tested with all schedules (verifier_test.cc, tests/attention/execution).
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "attention/plan/plan.h"
#include "attention/plan/tilings.h"
#include "attention/plan/traffic.h"
#include "attention/proof/verifier.h"
#include "common/error.h"

namespace annulus::moving_queries_test {
namespace {

// All ranks' traffic of a forward, and of a backward.
std::pair<Traffic, Traffic> sent_by_all(const PlanRequest& request) {
  std::pair<Traffic, Traffic> sum;
  sum.second.backward = true;
  for_each_program(request, [&](const Program& program) {
    for (auto* of : {&sum.first, &sum.second}) {
      const Traffic t = traffic(program, of->backward ? program.backward : program.forward);
      of->kv_rows += t.kv_rows, of->grad_rows += t.grad_rows;
      of->query_rows += t.query_rows, of->result_rows += t.result_rows;
    }
  });
  return sum;
}

TEST(MovingQueries, UlyssesSendsWhatItsFormulaSays) {
  for (const int64_t kv_heads : {2, 8, 16}) {
    for (const int within : {2, 4, 8}) {
      for (const ScheduleKind schedule : {ScheduleKind::kUlysses, ScheduleKind::kUlyssesRing}) {
        PlanRequest request;
        request.shape = {1, 16, kv_heads, 640, 640, 0};
        request.layout = LayoutKind::kZigzag, request.schedule = schedule, request.ranks = 8, request.within = within;
        // n (U - 1) / U of a rank's queries leave it, and as many results come back. Its keys go to the other ranks of
        // its group, and those of each place in the group to the other groups; where there are fewer kv heads than
        // ranks, several ranks read each.
        const int64_t n = 640 / 8, copies = std::max<int64_t>(kv_heads, within);
        const int64_t queries = 8 * n * 16 * (within - 1) / within;
        const int64_t keys = 2 * 8 * n * copies * (within - 1) / within + 2 * 8 * n * copies * (8 / within - 1);
        const auto [forward, backward] = sent_by_all(request);
        for (const Traffic& t : {forward, backward}) {
          EXPECT_EQ(t.query_rows, queries) << request.text();
          EXPECT_EQ(t.result_rows, queries) << request.text();
          EXPECT_EQ(t.kv_rows, keys) << request.text();
          EXPECT_EQ(t.grad_rows, t.backward ? keys : 0) << request.text();
        }
      }
    }
  }
}

// The figures of Mesh-Attention (arXiv 2512.20968) for a full mask: partial outputs in fp32, inputs of two bytes.
TEST(MovingQueries, MeshSendsLessThanARing) {
  const auto share_of_ring = [](int ranks, int64_t heads, int64_t kv_heads) {
    PlanRequest request;
    request.shape = {1, heads, kv_heads, 64 * ranks, 64 * ranks, 0};
    request.ranks = ranks;
    request.schedule = ScheduleKind::kRing;
    const double ring = static_cast<double>(sent_by_all(request).first.bytes(128, 2, 4));
    request.schedule = ScheduleKind::kMesh;
    const double mesh = static_cast<double>(sent_by_all(request).first.bytes(128, 2, 4));
    double least = mesh;
    for (const Tiling& tiling : tilings(request)) {
      least = std::min(least, tiling.bytes(128, 2, 4));
      request.within = tiling.columns;
      EXPECT_EQ(tiling.bytes(128, 2, 4), static_cast<double>(sent_by_all(request).first.bytes(128, 2, 4)));
    }
    EXPECT_EQ(least, mesh) << "the grid that is chosen sends least";
    return mesh / ring;
  };
  EXPECT_NEAR(share_of_ring(64, 8, 1), 0.68, 0.01);
  EXPECT_NEAR(share_of_ring(64, 1, 1), 0.28, 0.01);
  EXPECT_EQ(share_of_ring(16, 8, 1), 1);
}

TEST(MovingQueries, UlyssesRefusesHeadsThatItCannotDivide) {
  PlanRequest request;
  request.shape = {1, 12, 4, 64, 64, 0};
  request.schedule = ScheduleKind::kUlysses, request.ranks = 8;
  try {
    validate(request);
    FAIL() << "12 heads were divided among 8 ranks";
  } catch (const Error& error) {
    EXPECT_NE(
        std::string(error.what())
            .find("12 heads cannot be divided by 8; set within to a number that divides ranks and heads, such as 2, 4"),
        std::string::npos)
        << error.what();
  }
  request.within = 3;
  EXPECT_THROW(validate(request), Error);
  request.within = 4;
  EXPECT_TRUE(verify(request).holds());
}

// Two heads a rank, of which some read two kv heads: heads 2 and 3 the kv heads 0 and 1.
TEST(MovingQueries, HeadsOfARankMayReadPartsOfSeveralKvHeads) {
  for (const ScheduleKind schedule : {ScheduleKind::kUlysses, ScheduleKind::kUlyssesRing}) {
    PlanRequest request;
    request.shape = {1, 12, 4, 96, 96, 0};
    request.schedule = schedule, request.ranks = 12, request.within = 6;
    const Proof proof = verify(request);
    EXPECT_TRUE(proof.holds()) << proof.faults[0];
  }
}

}  // namespace
}  // namespace annulus::moving_queries_test
