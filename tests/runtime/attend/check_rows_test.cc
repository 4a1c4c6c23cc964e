// Tests of runtime/attend/check_rows.h: what is drawn and said, and planted faults, each of which the check of all
// pairs finds, and the check by rows with at least the probability that it states.
#include "runtime/attend/check_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/oracle/oracle.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::check_rows_test {
namespace {

constexpr double kScale = 0.4;
constexpr int64_t kLength = 256;

// A problem with the results that its definition gives, in the dtype of its inputs, on one rank.
struct Solved {
  RandomInput input = parse_random_input("queries=256,heads=2,kv_heads=1,dim=8,seed=5", "test");
  RandomTensors in = make_random(input);
  PatternSpec pattern = parse_pattern("{ kind = 'window', left = 40, right = 0 }", "test");

  OracleSoftmax softmax = {};

  AttentionShape shape() const { return input.shape(); }
  AttendResults results(const Count& count) const {
    const OracleResult exact = oracle(in.q, in.k, in.v, in.dout, kScale, count, {}, softmax);
    const auto rounded = [&](const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
    return {rounded(exact.out), rounded(exact.lse), rounded(exact.dq),
            rounded(exact.dk),  rounded(exact.dv),  rounded(exact.dsinks)};
  }
  AttendResults results() const { return results(count_of(pattern, shape())); }
  AttendProblem problem(int ranks = 1) const {
    AttendProblem p;
    p.asked = p.pattern = pattern;
    p.shape = shape();
    p.head_dim = input.dim;
    p.dtype = input.dtype;
    p.scale = kScale;
    p.softmax = softmax;
    p.queries = make_layout(LayoutKind::kZigzag, p.shape.q_len, ranks);
    p.keys = make_layout(LayoutKind::kZigzag, p.shape.k_len, ranks);
    p.inputs = [this](const std::vector<Span>& queries, const std::vector<Span>& keys) {
      return make_random(input, queries, keys);
    };
    return p;
  }
};

RowsReport check_alone(const Solved& solved, const AttendResults& results, const RowDraw& draw) {
  return check_rows(*make_self_communicator(), solved.problem(), results, draw);
}

bool found_by_all_pairs(const Solved& solved, const AttendResults& results) {
  try {
    check_results(solved.pattern, solved.shape(), solved.in, results, kScale, {}, solved.softmax);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInternal) << e.what();
    return true;
  }
  return false;
}

TEST(CheckRows, ReadsItsText) {
  EXPECT_EQ(parse_row_draw("rows=64", "--check").text(), "rows=64,seed=1");
  EXPECT_EQ(parse_row_draw("seed=7,rows=3", "--check").text(), "rows=3,seed=7");
  const auto refused = [](const std::string& text, const std::string& word) {
    expect_error(ErrorKind::kUsage, {word, "--check"}, [&] { parse_row_draw(text, "--check"); });
  };
  refused("rows=0", "rows: expected a whole number of at least 1, got \"0\"");
  refused("rows=abc", "got \"abc\"");
  refused("rows", "got \"\"");
  refused("rows=-3", "at least 1");
  refused("rows=3,seed=-1", "seed: expected a whole number of at least 0");
  refused("rows=3,rows=4", "expected nothing, to check all pairs, or rows=N");
  refused("keys=3", "or rows=N or rows=N,seed=S");
  refused("seed=3", "give rows=64,seed=3");
}

TEST(CheckRows, SaysWhatItHasCheckedAndWhatNot) {
  RowsReport report;
  report.parts = {{"out", 1.2e-7, 0.02, "batch row 0, head 0, query 4"}, {"lse", 3e-7, 0.041, "x"}};
  report.draw = {64, 7};
  report.rows = 64, report.all_rows = 131072, report.border_rows = 4;
  report.unchecked = {"the other rows"};
  EXPECT_EQ(report.text(),
            "check: out 1.2e-07, lse 3.0e-07; at most 4.1 % of what rounding allows\n"
            "checked: 64 of 131,072 rows (out, lse), drawn with seed 7: a fault in 5 % of them is missed with a "
            "probability of at most 3.8 %; besides 4 rows at the borders of ranks' parts\n"
            "not checked: the other rows");
  EXPECT_TRUE(report.passed());
  report.parts[0].share = 2.5;
  EXPECT_FALSE(report.passed());
  EXPECT_NE(report.errors().find("out of batch row 0, head 0, query 4 is off by 2.5 times what rounding allows"),
            std::string::npos)
      << report.errors();
}

TEST(CheckRows, FindsWrongSinksAndCaps) {
  Solved solved;
  solved.softmax = {.softcap = 1.5, .sinks = random_sinks(solved.input)};
  const AttendResults right = solved.results();
  EXPECT_TRUE(check_alone(solved, right, {100000, 1}).passed()) << check_alone(solved, right, {100000, 1}).text();
  EXPECT_FALSE(found_by_all_pairs(solved, right));
  const auto found = [&](const AttendResults& wrong, const std::string& what) {
    EXPECT_FALSE(check_alone(solved, wrong, {100000, 1}).passed()) << what;
    EXPECT_TRUE(found_by_all_pairs(solved, wrong)) << what;
  };
  AttendResults scaled = right;
  scaled.dsinks = right.dsinks * 1.01;
  found(scaled, "the gradients of the sinks");
  Solved without = solved;
  without.softmax.sinks = at::Tensor();
  AttendResults no_sinks = without.results();
  no_sinks.dsinks = right.dsinks;
  found(no_sinks, "no sinks");
  without.softmax = {.softcap = 1.51, .sinks = solved.softmax.sinks};
  found(without.results(), "another cap");
}

TEST(CheckRows, DrawsDifferentRowsBySeedAndAllIfThereAreNoMore) {
  const Solved solved;
  const AttendResults right = solved.results();
  const RowsReport all = check_alone(solved, right, {100000, 1});
  EXPECT_TRUE(all.passed()) << all.text();
  EXPECT_EQ(all.rows, 2 * kLength);
  EXPECT_EQ(all.keys, kLength);
  EXPECT_EQ(all.border_rows + all.border_keys, 0);
  EXPECT_EQ(all.missed(0.05), 0);
  EXPECT_NE(all.text().find("checked: all 512 rows (out, lse, dq) and all 256 keys (dk, dv)\n"), std::string::npos)
      << all.text();
  const auto drawn = [&](int64_t seed) { return check_alone(solved, right, {8, seed}).errors(); };
  EXPECT_EQ(drawn(1), drawn(1));
  EXPECT_NE(drawn(1), drawn(2));
  AttendResults forward = right;
  forward.dq = forward.dk = forward.dv = at::Tensor();
  const RowsReport without = check_alone(solved, forward, {8, 1});
  EXPECT_TRUE(without.passed());
  EXPECT_EQ(without.parts.size(), 2u);
  EXPECT_EQ(without.keys, 0);
}

// A fault in `rows` of all 512 (head, query), or in `keys` of all 256 keys.
struct Fault {
  std::string name;
  double rows, keys;
  std::function<AttendResults(const Solved&)> results;
};

std::vector<Fault> faults() {
  const auto changed = [](const std::function<void(AttendResults&)>& change) {
    return [change](const Solved& solved) {
      AttendResults results = solved.results();
      change(results);
      return results;
    };
  };
  return {
      {"a block of out has the values of its neighbour", 32, 0,
       changed([](AttendResults& r) { r.out.slice(1, 64, 80).copy_(r.out.slice(1, 80, 96).clone()); })},
      {"lse of two blocks is swapped", 64, 0, changed([](AttendResults& r) {
         const at::Tensor first = r.lse.slice(2, 96, 112).clone();
         r.lse.slice(2, 96, 112).copy_(r.lse.slice(2, 160, 176));
         r.lse.slice(2, 160, 176).copy_(first);
       })},
      {"dq of a head is not scaled", 256, 0, changed([](AttendResults& r) { r.dq.select(2, 1).div_(kScale); })},
      {"one rank's dk lacks a tenth", 0, 64, changed([](AttendResults& r) { r.dk.slice(1, 128, 192).mul_(0.9); })},
      {"dv of one key is not a number", 0, 1,
       changed([](AttendResults& r) { r.dv.slice(1, 77, 78).fill_(std::nan("")); })},
      {"dv of a block is halved", 0, 16, changed([](AttendResults& r) { r.dv.slice(1, 32, 48).mul_(0.5); })},
      // The queries from 41 on see one key more; every key but the last 41 is seen by one query more.
      {"the mask is shifted by one", 2 * 215, 215,
       [](const Solved& solved) {
         return solved.results([](int64_t, int64_t, int64_t i, int64_t j) -> int64_t { return j <= i && j >= i - 41; });
       }},
      {"a block of keys is missing for a block of queries", 32, 16,
       [](const Solved& solved) {
         const Count right = count_of(solved.pattern, solved.shape());
         return solved.results([right](int64_t b, int64_t h, int64_t i, int64_t j) {
           return i >= 112 && i < 128 && j >= 96 && j < 112 ? 0 : right(b, h, i, j);
         });
       }},
      {"keys are counted twice for a query", 2, 41,
       [](const Solved& solved) {
         const Count right = count_of(solved.pattern, solved.shape());
         return solved.results(
             [right](int64_t b, int64_t h, int64_t i, int64_t j) { return (i == 200 ? 2 : 1) * right(b, h, i, j); });
       }},
  };
}

TEST(CheckRows, FindsEachPlantedFaultWithTheStatedProbability) {
  constexpr int64_t kRows = 32;
  constexpr int kDraws = 100;
  const Solved solved;
  const AttendResults right = solved.results();
  EXPECT_FALSE(found_by_all_pairs(solved, right));
  for (int seed = 0; seed < kDraws; ++seed) {
    const RowsReport report = check_alone(solved, right, {kRows, seed});
    EXPECT_TRUE(report.passed()) << report.text();
  }
  for (const Fault& fault : faults()) {
    SCOPED_TRACE(fault.name);
    const AttendResults wrong = fault.results(solved);
    EXPECT_TRUE(found_by_all_pairs(solved, wrong));
    EXPECT_FALSE(check_alone(solved, wrong, {100000, 1}).passed());
    int missed = 0;
    for (int seed = 0; seed < kDraws; ++seed) missed += check_alone(solved, wrong, {kRows, seed}).passed();
    const RowsReport report = check_alone(solved, wrong, {kRows, 0});
    const double stated = std::min(report.missed(fault.rows / 512), report.missed(fault.keys / 256));
    // The draws are independent, so by Hoeffding's inequality more than this are missed with a probability of at most
    // exp(-2 draws 0.25^2) = 4e-6.
    EXPECT_LE(missed, kDraws * (stated + 0.25)) << "stated: " << stated;
    // The statement is no understatement either: what one key of 256 has is mostly missed.
    if (stated > 0.8) {
      EXPECT_GT(missed, 0);
    }
  }
}

// The results of the rows that a rank has in a layout.
AttendResults part_of(const AttendResults& whole, const AttendProblem& p, int rank) {
  const auto rows = [&](const at::Tensor& t, const Layout& layout, int64_t dim) {
    std::vector<at::Tensor> parts;
    for (const Span& span : layout.spans[static_cast<size_t>(rank)]) {
      if (!span.empty()) parts.push_back(t.slice(dim, span.begin, span.last() + 1, span.stride));
    }
    return at::cat(parts, dim).contiguous();
  };
  return {rows(whole.out, p.queries, 1), rows(whole.lse, p.queries, 2), rows(whole.dq, p.queries, 1),
          rows(whole.dk, p.keys, 1), rows(whole.dv, p.keys, 1)};
}

TEST(CheckRows, RanksReportTheSameAndNameTheRow) {
  const Solved solved;
  constexpr int kRanks = 3;
  const AttendProblem problem = solved.problem(kRanks);
  for (const bool broken : {false, true}) {
    AttendResults results = solved.results();
    // Key 100 is one of rank 2's in zigzag order.
    if (broken) results.dk.slice(1, 100, 101).add_(0.01);
    std::vector<std::string> texts(kRanks);
    run_ranks(kRanks, [&](Communicator& world) {
      const RowsReport report =
          check_rows(world, problem, part_of(results, problem, world.rank()), {broken ? 1000 : 16, 1});
      EXPECT_EQ(report.passed(), !broken) << report.text();
      texts[static_cast<size_t>(world.rank())] = report.text();
    });
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_EQ(texts[0], texts[2]);
    if (broken) {
      EXPECT_NE(texts[0].find("dk of batch row 0, kv head 0, key 100 is off by"), std::string::npos) << texts[0];
    } else {
      EXPECT_NE(texts[0].find(" keys at the borders of ranks' parts"), std::string::npos) << texts[0];
    }
  }
}

TEST(CheckRows, FindsBlocksThatTheDefinitionDoesNotSelect) {
  Solved solved;
  solved.pattern = parse_pattern(
      "{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, "
      "{ kind = 'blocks', map = 'adaptive', block = 32, keep = 2, query = 'first', causal = true }, "
      "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 3 }] }",
      "test");
  const PatternSpec asked = solved.pattern;
  // A member whose map is what the definition selects, but for one query block of one head.
  const auto use = [&](size_t member, bool wrong) {
    PatternSpec alone = asked.members[member];
    const BlocksSpec& spec = alone.blocks;
    const Count count = count_of(alone, solved.shape(), solved.in.q, solved.in.k);
    const int64_t blocks = kLength / spec.block, last = spec.block - 1;
    std::vector<uint8_t> active;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < blocks; ++i) {
        // The last query of a block sees all of its blocks, also if they are causal.
        for (int64_t j = 0; j < blocks; ++j) active.push_back(count(0, h, i * spec.block + last, j * spec.block) > 0);
        if (wrong && h == 1 && i == 3) std::rotate(active.end() - blocks, active.end() - blocks + 1, active.end());
      }
    }
    solved.pattern.members[member].blocks = given_map(
        std::make_shared<const BlockMap>(block_map_from_dense(active.data(), spec.block, 1, 2, blocks, blocks)));
  };
  for (const size_t wrong : {0, 1, 2}) {
    use(1, wrong == 1), use(2, wrong == 2);
    const AttendResults results = solved.results();  // right for the blocks that were used
    for (const int ranks : {1, 3}) {
      AttendProblem problem = solved.problem(ranks);
      problem.asked = asked;
      run_ranks(ranks, [&](Communicator& world) {
        const RowsReport report = check_rows(world, problem, part_of(results, problem, world.rank()), {1000, 1});
        EXPECT_EQ(report.passed(), wrong == 0) << report.text();
        if (wrong == 0) return;
        EXPECT_NE(report.text().find("batch row 0, head 1, query block 3: "), std::string::npos) << report.text();
      });
    }
  }
}

// The inputs come from their source by position, so that a rank that computes with another's is found.
TEST(CheckRows, FindsInputsThatAreNotThoseOfTheirPositions) {
  Solved solved;
  Solved other;
  other.in.k.slice(1, 10, 20).copy_(solved.in.k.slice(1, 110, 120));
  const AttendResults results = other.results();
  EXPECT_FALSE(check_alone(solved, results, {64, 1}).passed());
}

// dk and dv follow from lse and out as reported: wrong ones are found even if their rows are not drawn.
TEST(CheckRows, KeysShowAWrongForwardThatTheBackwardDidNotUse) {
  const Solved solved;
  AttendResults results = solved.results();
  results.lse.add_(1);
  const RowsReport report = check_alone(solved, results, {4, 1});
  for (const RowsReport::Part& part : report.parts) {
    EXPECT_EQ(part.share > 1, part.name == "lse" || part.name == "dk" || part.name == "dv") << part.name;
  }
}

TEST(CheckRows, RowsWithoutKeysHaveExactlyZero) {
  Solved solved;
  solved.pattern = parse_pattern("{ kind = 'slices', slices = [{ queries = [0, 1, 9], keys = [3, 1, 2] }] }", "test");
  AttendResults results = solved.results();
  EXPECT_TRUE(check_alone(solved, results, {1000, 1}).passed());
  results.out.slice(1, 200, 201).fill_(1e-30);
  EXPECT_FALSE(check_alone(solved, results, {1000, 1}).passed());
}

TEST(CheckRows, RefusesWhatRoundingWouldHide) {
  Solved solved;
  AttendProblem problem = solved.problem();
  problem.scale = 1e30;
  const AttendResults results = solved.results();
  expect_error(ErrorKind::kUsage, {"--check says nothing here"}, [&] {
    check_rows(*make_self_communicator(), problem, results, {8, 1});
  });
}

}  // namespace
}  // namespace annulus::check_rows_test
