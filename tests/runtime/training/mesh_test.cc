// Tests of runtime/training/mesh.h: which ranks share the communicator of an axis, and sizes that do not fit the world.
#include "runtime/training/mesh.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::mesh_test {
namespace {

TEST(Mesh, LastAxisHasConsecutiveRanks) {
  run_ranks(6, [](Communicator& world) {
    Mesh mesh(world, {{"data", 2}, {"context", 0}});
    EXPECT_EQ(mesh.size("data"), 2);
    EXPECT_EQ(mesh.size("context"), 3);
    EXPECT_EQ(mesh.index("data"), world.rank() / 3);
    EXPECT_EQ(mesh.index("context"), world.rank() % 3);
    EXPECT_EQ(mesh.axis("context").rank(), mesh.index("context"));
    EXPECT_EQ(mesh.axis("data").rank(), mesh.index("data"));
    EXPECT_EQ(mesh.text(), "data 2 x context 3");
    at::Tensor sum = at::full({1}, world.rank(), at::kLong);
    mesh.axis("context").all_reduce(sum, ReduceOp::kSum, {"test", 0});
    EXPECT_EQ(sum.item<int64_t>(), world.rank() < 3 ? 0 + 1 + 2 : 3 + 4 + 5);
    sum = at::full({1}, world.rank(), at::kLong);
    mesh.axis("data").all_reduce(sum, ReduceOp::kSum, {"test", 1});
    EXPECT_EQ(sum.item<int64_t>(), 2 * (world.rank() % 3) + 3);
    EXPECT_THROW(mesh.axis("tensor"), Error);
    Mesh partly(world, {{.name = "data", .size = 2, .connected = false}, {.name = "context", .size = 3}});
    EXPECT_EQ(partly.axis("context").size(), 3);
    EXPECT_EQ(partly.index("data"), world.rank() / 3);
    EXPECT_THROW(partly.axis("data"), Error);
    partly.progress();
  });
}

TEST(Mesh, ErrorNamesTheAxisOfTheRemainingRanks) {
  EXPECT_EQ(axes_text({{"data", 2}, {"context", 4}}), "data 2 x context 4");
  expect_error(ErrorKind::kPlan, {"the mesh data 2 x context (all others) needs a multiple of 2 ranks"}, [] {
    fit_axes({{"data", 2}, {"context", 0}}, 3);
  });
}

TEST(Mesh, RefusesSizesThatDoNotMultiplyToTheRanks) {
  for (const auto& axes : std::vector<std::vector<MeshAxis>>{{{"data", 3}, {"context", 0}},
                                                             {{"data", 2}, {"context", 1}},
                                                             {{"data", 0}, {"context", 0}},
                                                             {{"data", -1}, {"context", 4}},
                                                             {{"data", 8}, {"context", 0}}}) {
    expect_error(ErrorKind::kPlan, {}, [&] { fit_axes(axes, 4); });
  }
}

}  // namespace
}  // namespace annulus::mesh_test
