// Tests of the verifier against brute-force counting and planted mistakes.
#include "attention/proof/verifier.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "attention/oracle/oracle.h"
#include "attention/testing/any_request.h"
#include "common/error.h"
#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::verifier_test {
namespace {

using testing::Mistake;
using testing::planted_mistakes;
using testing::programs_of;
using testing::ring_of_four;

RC_GTEST_PROP(Verifier, ProvesCorrectPlansAndCountsTheirPairs, ()) {
  const PlanRequest request = testing::any_request();
  const Proof proof = verify(request);
  RC_ASSERT(proof.faults == std::vector<std::string>{});
  const auto count = count_of(request.pattern, request.shape);
  const AttentionShape& shape = request.shape;
  int64_t pairs = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t i = 0; i < shape.q_len; ++i) {
        for (int64_t j = 0; j < shape.k_len; ++j) pairs += count(b, h, i, j);
      }
    }
  }
  RC_ASSERT(proof.pairs == pairs);
}

// What each rank proves about its own program, and the differences that it finds between its transfers and those of its
// peers. This is what prove_together does, without a communicator.
struct Shares {
  std::vector<std::string> alone, compared;
  int64_t tiles = 0, transfers = 0, pairs = 0;
};
Shares verify_shares(const std::vector<Program>& programs) {
  Shares shares;
  std::vector<std::vector<PairDigest>> sent, received;
  std::vector<std::array<uint64_t, 3>> of_ranks;
  for (const Program& p : programs) {
    const Proof proof = verify_rank(p, *cached_pattern(p.request));
    of_ranks.push_back(fingerprints(proof));
    shares.alone.insert(shares.alone.end(), proof.faults.begin(), proof.faults.end());
    shares.tiles += proof.tiles, shares.transfers += proof.transfers, shares.pairs += proof.pairs;
    sent.push_back(sent_digests(p));
    received.push_back(received_digests(p));
  }
  if (shares.alone.empty()) shares.compared = compare_pairs(of_ranks);
  for (size_t from = 0; from < programs.size(); ++from) {
    for (size_t to = 0; to < programs.size(); ++to) {
      for (const std::string& fault :
           compare_digests(static_cast<int>(from), static_cast<int>(to), sent[from][to], received[to][from])) {
        shares.compared.push_back(fault);
      }
    }
  }
  return shares;
}

RC_GTEST_PROP(Verifier, SharesOfTheRanksAddUpToTheWholeProof, ()) {
  const std::vector<Program> programs = programs_of(testing::any_request());
  const Proof whole = verify(programs);
  const Shares shares = verify_shares(programs);
  RC_ASSERT(shares.alone == std::vector<std::string>{});
  RC_ASSERT(shares.compared == std::vector<std::string>{});
  RC_ASSERT(shares.tiles == whole.tiles);
  RC_ASSERT(shares.transfers == whole.transfers);
  RC_ASSERT(shares.pairs == whole.pairs);
}

class PlantedMistake : public ::testing::TestWithParam<Mistake> {
 protected:
  void SetUp() override {
    programs_ = programs_of(GetParam().request);
    ASSERT_TRUE(verify(programs_).holds());
    GetParam().plant(programs_);
  }
  std::vector<Program> programs_;
};

TEST_P(PlantedMistake, IsFound) {
  const Proof proof = verify(programs_);
  ASSERT_FALSE(proof.holds()) << GetParam().name;
  std::string all;
  for (const std::string& fault : proof.faults) all += fault + "\n";
  EXPECT_NE(all.find(GetParam().finding), std::string::npos) << all;
}

TEST_P(PlantedMistake, IsFoundByTheRanksTogether) {
  const Shares shares = verify_shares(programs_);
  if (GetParam().between_two) {
    EXPECT_EQ(shares.alone, std::vector<std::string>{});
    EXPECT_FALSE(shares.compared.empty());
  } else {
    EXPECT_FALSE(shares.alone.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedMistake, ::testing::ValuesIn(planted_mistakes()),
                         [](const auto& info) { return info.param.name; });

TEST(Verifier, RefusesProgramsOfDifferentPlans) {
  std::vector<Program> programs = programs_of(ring_of_four());
  programs[2].request.shape.q_len = 65;
  EXPECT_THROW(verify(programs), Error);
  programs.pop_back();
  EXPECT_THROW(verify(programs), Error);
}

TEST(Verifier, ProvesAMillionTokensOverSixtyFourRanks) {
  for (const LayoutKind layout : {LayoutKind::kZigzag, LayoutKind::kStriped}) {
    PlanRequest request;
    request.shape = {1, 8, 1, 1 << 20, 1 << 20, 0};
    request.pattern.causal = true;
    request.layout = layout;
    request.ranks = 64;
    const Proof proof = verify(request);
    EXPECT_TRUE(proof.holds()) << proof.faults[0];
    const int64_t S = 1 << 20;
    EXPECT_EQ(proof.pairs, 8 * (S * (S + 1) / 2));
  }
}

// Equal rows are verified together: the largest number of heads that a shape may have is one class, like one head.
TEST(Verifier, ProvesTheLargestNumberOfHeads) {
  PlanRequest request;
  request.shape = {1, 1 << 24, 1 << 24, 64, 64, 0};
  request.pattern = causal_pattern();
  request.schedule = ScheduleKind::kRing;  // auto may choose another for one head
  request.ranks = 4;
  const Proof proof = verify(request);
  EXPECT_TRUE(proof.holds()) << proof.faults[0];
  EXPECT_EQ(proof.pairs, (int64_t{1} << 24) * (64 * 65 / 2));
  request.shape.heads = request.shape.kv_heads = 1;
  EXPECT_EQ(proof.tiles, verify(request).tiles);
}

TEST(Verifier, DeclaresItsMemory) {
  PlanRequest request;
  request.shape = {1, 8, 1, 1000, 1000, 0};
  request.pattern = causal_pattern();
  request.layout = LayoutKind::kZigzag;
  request.ranks = 3;
  const auto bytes = [&] { return proof_bytes(request, make_pattern(request.pattern, request.shape)); };
  EXPECT_EQ(bytes(), 2 * (8 + 2) * 1000);
  // Positions of a rank are 3 apart, so there are sums with strides 1 and 3.
  request.layout = LayoutKind::kStriped;
  EXPECT_EQ(bytes(), 2 * (2 * 8 + 2) * 1000);
  // The pattern has every second position, so there are sums with stride 1 for single positions, 2 and 6.
  request.pattern = parse_pattern("{ kind = 'dilated', segment_lengths = [100], dilation_rates = [2] }", "");
  EXPECT_EQ(bytes(), 2 * (3 * 8 + 2) * 1000);
}

}  // namespace
}  // namespace annulus::verifier_test
