// Tests of what MultiheadAttention refuses, on one rank and on all ranks.
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "attention/modules/multihead_attention.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/attention/modules/small_module.h"

namespace annulus::refusals_test {
namespace {

using testing::made;
using testing::small;

TEST(MultiheadAttention, RefusesInvalidOptions) {
  const auto refused = [](const MultiheadAttentionOptions& o, const std::string& text) {
    try {
      MultiheadAttention m(o);
      ADD_FAILURE() << "made: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPlan);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  refused({}, "dim and heads must be 1 to");
  refused({.dim = 10, .heads = 3}, "make dim a multiple of heads");
  refused({.dim = 12, .heads = 4, .kv_heads = 3}, "heads must be a multiple of kv_heads");
  refused({.dim = 12, .heads = 4, .head_dim = 3, .rotary_base = 100}, "head_dim 3 must be even");
  refused({.dim = int64_t{1} << 40, .heads = 4}, "dim and heads must be");
  MultiheadAttentionOptions o = small();
  o.dropout = 1;
  refused(o, "dropout");
  MultiheadAttention m = made(small());
  const auto comm = make_self_communicator();
  EXPECT_THROW(m->forward(at::randn({9, 12}, at::kDouble), {.comm = *comm}), Error);
  EXPECT_THROW(m->forward(at::randn({1, 9, 11}, at::kDouble), {.comm = *comm}), Error);
}

// One rank gets invalid options or inputs, or others than the other ranks. All ranks raise an error that names it.
TEST(MultiheadAttention, RefusalOfOneRankIsRaisedOnAll) {
  struct Case {
    const char* what;
    std::function<void(MultiheadAttentionOptions&)> options;
    std::function<at::Tensor(const at::Tensor&)> x, memory;
    bool differs = false;  // valid by itself, but different from the other ranks
  };
  const auto same = [](const at::Tensor& t) { return t; };
  const auto none = [](MultiheadAttentionOptions&) {};
  const std::vector<Case> cases = {
      {"x is Float on cpu", none, [](const at::Tensor& t) { return t.to(at::kFloat); }, same},
      {"x must be [batch, positions, 12]", none, [](const at::Tensor& t) { return t.select(0, 0); }, same},
      {"memory must be [batch, positions, 12]", none, same, [](const at::Tensor& t) { return t.narrow(2, 0, 5); }},
      {"but memory has 1", none, same, [](const at::Tensor& t) { return t.narrow(0, 0, 1); }},
      {"x is an undefined tensor", none, [](const at::Tensor&) { return at::Tensor(); }, same},
      {"zigzag", [](MultiheadAttentionOptions& o) { o.layout = LayoutKind::kZigzag; }, same, same, true},
      {"left = 3",
       [](MultiheadAttentionOptions& o) {
         o.pattern = parse_pattern("{ kind = 'window', left = 3, right = 0 }", "test");
       },
       same, same, true},
      {"rotary_base = 50", [](MultiheadAttentionOptions& o) { o.rotary_base = 50; }, same, same, true},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    std::mutex mutex;
    int raised = 0;
    run_ranks(3, [&](Communicator& comm) {
      comm.set_timeout(Seconds(5));
      MultiheadAttentionOptions o = small();
      const bool other = comm.rank() == 1;
      if (other) c.options(o);
      MultiheadAttention m(o);
      m->to(at::kDouble);
      const at::Tensor x = at::zeros({2, comm.rank() == 2 ? 6 : 4, 12}, at::kDouble);
      try {
        m->forward(other ? c.x(x) : x, other ? c.memory(x.clone()) : x.clone(), {.comm = comm});
      } catch (const Error& e) {
        const std::lock_guard lock(mutex);
        EXPECT_EQ(e.kind(), c.differs ? ErrorKind::kMismatch : ErrorKind::kPlan)
            << "rank " << comm.rank() << ": " << e.what();
        EXPECT_NE(std::string(e.what()).find(c.what), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find("rank 1"), std::string::npos) << e.what();
        ++raised;
      }
    });
    EXPECT_EQ(raised, 3);
  }
}

// The backwards of two forwards of one module, in another order on one rank.
TEST(MultiheadAttention, BackwardsInAnotherOrderAreRefusedOnEveryRank) {
  run_ranks(2, [](Communicator& comm) {
    MultiheadAttention m = made(small());
    const at::Tensor x = at::randn({1, 4, 12}, at::kDouble).requires_grad_();
    const at::Tensor outs[] = {m->forward(x, {.comm = comm}).sum(), m->forward(x, {.comm = comm}).sum()};
    try {
      outs[comm.rank()].backward();
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kMismatch) << e.what();
      EXPECT_NE(std::string(e.what()).find("is number 1 on rank 0, number 2 on rank 1"), std::string::npos) << e.what();
    }
  });
}

// If all ranks get the same invalid input, each raises the error that a single rank would raise.
TEST(MultiheadAttention, RanksThatAllRefuseRaiseTheirOwnError) {
  run_ranks(2, [&](Communicator& comm) {
    comm.set_timeout(Seconds(5));
    MultiheadAttention m(small());
    try {
      m->forward(at::zeros({2, 4, 11}), {.comm = comm});
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPlan) << e.what();
      EXPECT_NE(std::string(e.what()).find("x must be [batch, positions, 12]"), std::string::npos) << e.what();
    }
  });
}

}  // namespace
}  // namespace annulus::refusals_test
