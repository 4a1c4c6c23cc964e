// Tests spans, tiles and programs against counting one by one. layout_test.cc tests layouts.
#include "attention/plan/plan.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "attention/plan/schedules.h"
#include "attention/plan/tiles.h"
#include "attention/plan/traffic.h"
#include "attention/proof/plans.h"
#include "attention/proof/verifier.h"
#include "attention/testing/any_request.h"
#include "common/error.h"

namespace annulus::plan_test {
namespace {

std::set<int64_t> members_of(const Span& s) {
  std::set<int64_t> set;
  for (int64_t i = 0; i < s.count; ++i) set.insert(s.at(i));
  return set;
}

Span any_span() { return {*rc::gen::inRange(0, 60), *rc::gen::inRange(1, 14), *rc::gen::inRange(0, 20)}; }

RC_GTEST_PROP(Span, IntersectionHoldsTheCommonMembers, ()) {
  const Span a = any_span(), b = any_span();
  std::set<int64_t> common;
  for (const int64_t x : members_of(a)) {
    if (b.contains(x)) common.insert(x);
  }
  RC_ASSERT(members_of(intersect(a, b)) == common);
  RC_ASSERT(members_of(intersect(b, a)) == common);
}

RC_GTEST_PROP(Span, ClipKeepsTheMembersInRange, ()) {
  const Span a = any_span();
  const int64_t lo = *rc::gen::inRange(-10, 300), hi = *rc::gen::inRange(-10, 300);
  std::set<int64_t> kept;
  for (const int64_t x : members_of(a)) {
    if (x >= lo && x <= hi) kept.insert(x);
  }
  RC_ASSERT(members_of(a.clip(lo, hi)) == kept);
}

TEST(Span, IntersectionOfFarSpansDoesNotOverflow) {
  const int64_t far = int64_t{1} << 40;
  const Span a{1, far - 1, 3}, b{2, far - 3, 3};
  EXPECT_TRUE(intersect(a, b).empty());
  const Span c{0, far - 1, 3}, d{0, far - 3, 3};
  EXPECT_EQ(intersect(c, d), (Span{0, 1, 1}));
}

TEST(Plan, RefusesHeadsThatKvHeadsDoNotDivide) {
  PlanRequest request;
  request.shape = {1, 6, 4, 16, 16, 0};
  EXPECT_THROW(make_program(request, 0), Error);
}

// The rows that a rank needs of another are exact: each of them meets one of its queries. The tiles with those rows,
// in any division into blocks, count every pair as often as the pattern does. The slices are random.
RC_GTEST_PROP(Tiles, CountEveryPairAsThePatternDoes, ()) {
  using Pair = std::tuple<int64_t, int64_t, int64_t, int64_t>;
  Pattern pattern;
  pattern.shape = {2, 4, 2, 24, 24, 0};
  const auto part = [](int64_t length) {
    const int64_t stride = *rc::gen::inRange<int64_t>(1, 4), begin = *rc::gen::inRange<int64_t>(0, length);
    return Span{begin, stride, *rc::gen::inRange<int64_t>(0, (length - begin - 1) / stride + 2)};
  };
  const int64_t slices = *rc::gen::inRange(1, 4);
  for (int64_t i = 0; i < slices; ++i) {
    Slice slice{part(2), part(4), part(24), part(24), {}};
    if (*rc::gen::arbitrary<bool>()) slice.band.hi = *rc::gen::inRange(-26, 27);
    if (*rc::gen::arbitrary<bool>()) slice.band.lo = *rc::gen::inRange(-26, 27);
    pattern.slices.push_back(slice);
  }
  const Layout layout =
      make_layout(*rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped), 24,
                  *rc::gen::inRange(1, 6));
  const int owner = *rc::gen::inRange(0, layout.ranks()), reader = *rc::gen::inRange(0, layout.ranks());
  const int other = *rc::gen::inRange(0, layout.ranks());
  const std::vector<Span>& queries = layout.spans[static_cast<size_t>(reader)];
  Needs needs(pattern, layout, layout);
  const auto of = [&](int of_reader) { return needs.read_by(of_reader)[static_cast<size_t>(owner)]; };
  const RowBits needed = of(reader);
  RC_ASSERT(needs.read_of(owner)[static_cast<size_t>(reader)].words == needed.words);
  RowBits more = needed;
  more.join(of(other));
  const bool backward = *rc::gen::arbitrary<bool>(), whole = *rc::gen::arbitrary<bool>();
  const RowSet rows = whole ? needs.all_rows(owner) : needs.rows(more), grad_rows = needs.rows(needed);
  RC_ASSERT(grad_rows.rows() == needs.count(needed));
  RC_ASSERT(!whole || !needs.complete(needed) || grad_rows == rows);
  std::vector<Tile> tiles;
  append_tiles(needs.parts(reader), 2, rows, 0, grad_rows, backward ? 1 : -1, tiles);

  std::map<Pair, int> want, got;
  const auto count = [](std::map<Pair, int>& pairs, const Span& b, const Span& h, const Span& q, const Span& k,
                        const Band& band, auto keep) {
    for (int64_t x = 0; x < b.count; ++x)
      for (int64_t y = 0; y < h.count; ++y)
        for (int64_t i = 0; i < q.count; ++i)
          for (int64_t j = 0; j < k.count; ++j)
            if (band.contains(q.at(i), k.at(j)) && keep(b.at(x), h.at(y), q.at(i), k.at(j)))
              ++pairs[{b.at(x), h.at(y), q.at(i), k.at(j)}];
  };
  const auto in = [](const std::vector<Span>& spans, int64_t x) {
    for (const Span& s : spans)
      if (s.contains(x)) return true;
    return false;
  };
  for (const Slice& s : pattern.slices) {
    count(want, s.batch, s.heads, s.queries, s.keys, s.band, [&](int64_t, int64_t, int64_t q, int64_t k) {
      return in(queries, q) && in(layout.spans[static_cast<size_t>(owner)], k);
    });
  }
  std::set<std::tuple<int64_t, int64_t, int64_t>> met;  // batch row, kv head, key
  for (const auto& [pair, times] : want) met.insert({std::get<0>(pair), std::get<1>(pair) / 2, std::get<3>(pair)});
  RC_ASSERT(static_cast<int64_t>(met.size()) == needs.count(needed));
  for (const Tile& t : tiles) {
    count(got, t.batch, t.heads, t.query_positions, t.key_positions, t.band,
          [](int64_t, int64_t, int64_t, int64_t) { return true; });
  }
  RC_ASSERT(got == want);
}

// Random slices over 2 batch rows and 4 heads, with any strides and bands; they may overlap.
Pattern any_slices(int64_t length) {
  Pattern pattern{{2, 4, 2, length, length, 0}, {}};
  const auto part = [](int64_t n) {
    const int64_t stride = *rc::gen::inRange<int64_t>(1, 6), begin = *rc::gen::inRange<int64_t>(0, n);
    return Span{begin, stride, *rc::gen::inRange<int64_t>(0, (n - begin - 1) / stride + 2)};
  };
  for (int64_t i = *rc::gen::inRange(0, 5); i > 0; --i) {
    Slice slice{part(2), part(4), part(length), part(length), {}};
    if (*rc::gen::arbitrary<bool>()) slice.band.hi = *rc::gen::inRange(-10, 20);
    if (*rc::gen::arbitrary<bool>()) slice.band.lo = *rc::gen::inRange(-20, 10);
    pattern.slices.push_back(slice);
  }
  return pattern;
}

// Expects that a block on its way around the ring carries the union of what each rank ahead of it needs, and likewise
// for the ranks that it has visited. The number of rows that ranks need of others is the sum over all pairs of ranks.
void expect_unions_of_visits(const Pattern& pattern, const Layout& layout) {
  const int P = layout.ranks();
  Needs needs(pattern, layout, layout);
  int64_t foreign = 0;
  for (int owner = 0; owner < P; ++owner) {
    const std::vector<RowBits> read = needs.read_of(owner);
    const auto visitor = [&](int visit) { return read[static_cast<size_t>((owner + visit) % P)]; };
    const auto expect = [&](int first, int past) {
      RowBits together{owner, {}};
      for (int i = first; i < past; ++i) together.join(visitor(i));
      const RowSet want = together.any() ? needs.rows(together) : RowSet{};
      RC_ASSERT(needs.needed_on_the_way(owner, first, past) == want);
      return needs.count(together);
    };
    int first_visit = 0, last_visit = 0;
    for (int visit = 1; visit < P; ++visit) {
      expect(1, visit + 1);
      expect(visit, P);
      foreign += needs.count(visitor(visit));
      if (!visitor(visit).any()) continue;
      if (first_visit == 0) first_visit = visit;
      last_visit = visit;
    }
    RC_ASSERT(needs.first_and_last_visit(owner) == std::pair(first_visit, last_visit));
    if (P > 1) RC_ASSERT(needs.last_visit_needs_all(owner) == (expect(1, P) == needs.count(visitor(P - 1))));
  }
  RC_ASSERT(static_cast<int64_t>(needs.foreign_rows()) == foreign);
}

RC_GTEST_PROP(Needs, RowsOnTheRingAreTheUnionsOfVisits, ()) {
  for (int draw = 0; draw < 20; ++draw) {  // each case is cheap
    const Pattern pattern = any_slices(40);
    expect_unions_of_visits(
        pattern, make_layout(*rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped), 40,
                             *rc::gen::inRange(1, 9)));
  }
}

// Results that are kept from one rank's program for the next do not change any program.
RC_GTEST_PROP(Plan, ProgramsMadeTogetherEqualThoseMadeOneByOne, ()) {
  const PlanRequest request = testing::any_request();
  int rank = 0;
  for_each_program(request, [&](const Program& program) {
    RC_ASSERT(program == make_program(request, rank));
    ++rank;
  });
  RC_ASSERT(rank == request.ranks);
}

// A whole plan of the size that annulus is made for; what its ranks send and hold is known in closed form.
TEST(Plan, PlansAThousandRanksAndAMillionTokens) {
  PlanRequest request;
  request.shape = {1, 64, 8, 1 << 20, 1 << 20, 0};
  request.pattern = causal_pattern();
  request.layout = LayoutKind::kZigzag;
  request.schedule = ScheduleKind::kRing;
  request.ranks = 1024;
  const int64_t block = 2 * 8 * 1024, half = block / 2;  // rows of K and V of one rank
  int64_t rank = 0;
  int64_t kv_rows = 0;
  for_each_program(request, [&](const Program& program) {
    ASSERT_EQ(program.rank, rank);
    ASSERT_EQ(program.request.schedule, ScheduleKind::kRing);
    const Traffic forward = traffic(program, program.forward), backward = traffic(program, program.backward);
    // Of a block, the later half is needed only by ranks before its owner, which it visits last. The later half of rank
    // 0, the end of the sequence, is needed by no other rank and is not sent.
    EXPECT_EQ(forward.kv_rows, 1023 * block - (rank < 1023 ? half : 0));
    EXPECT_LE(forward.peak_kv_rows, 3 * block);
    EXPECT_LE(backward.peak_kv_rows, 3 * block);
    EXPECT_LE(backward.peak_grad_rows, 3 * block);
    kv_rows += forward.kv_rows;
    ++rank;
  });
  EXPECT_EQ(rank, 1024);
  EXPECT_EQ(kv_rows, 1024 * 1023 * block - 1023 * half);
}

// Returns the number of rows that all ranks send in the forward; K and V count separately.
int64_t rows_sent(PlanRequest request, const Pattern& pattern, ScheduleKind schedule) {
  request.schedule = schedule;
  int64_t rows = 0;
  for (int r = 0; r < request.ranks; ++r) {
    const Program program = make_program(request, pattern, r);
    rows += traffic(program, program.forward).kv_rows;
  }
  return rows;
}

// Group-cast sends each row once to each rank that needs it, and no schedule sends less. The ring sends a row as far as
// the last rank that needs it, and all-gather sends a row to all ranks if any other rank needs it.
RC_GTEST_PROP(Plan, SchedulesSendOnlyNeededRows, ()) {
  PlanRequest request;
  request.shape = {2, 4, 2, 40, 40, 0};
  request.layout = *rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped);
  request.ranks = *rc::gen::inRange(1, 8);
  const auto part = [](int64_t length) {
    const int64_t stride = *rc::gen::inRange<int64_t>(1, 6), begin = *rc::gen::inRange<int64_t>(0, length);
    return Span{begin, stride, *rc::gen::inRange<int64_t>(0, (length - begin - 1) / stride + 2)};
  };
  Pattern pattern{request.shape, {}};
  for (int64_t i = *rc::gen::inRange(0, 4); i > 0; --i) {
    Slice slice{part(2), part(4), part(40), part(40), {}};
    if (*rc::gen::arbitrary<bool>()) slice.band.hi = *rc::gen::inRange(-10, 20);
    if (*rc::gen::arbitrary<bool>()) slice.band.lo = *rc::gen::inRange(-20, 10);
    pattern.slices.push_back(slice);
  }
  const Layout layout = query_layout(request);
  const auto owner_of = [&](int64_t position) {
    for (int r = 0; r < layout.ranks(); ++r) {
      for (const Span& s : layout.spans[static_cast<size_t>(r)]) {
        if (s.contains(position)) return r;
      }
    }
    return -1;
  };
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::set<int>> readers;  // of (batch row, kv head, key): other ranks
  for (const Slice& s : pattern.slices) {
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        if (!s.batch.contains(b) || !s.heads.contains(h)) continue;
        for (int64_t q = 0; q < 40; ++q) {
          for (int64_t k = 0; k < 40; ++k) {
            if (!s.queries.contains(q) || !s.keys.contains(k) || !s.band.contains(q, k)) continue;
            if (owner_of(q) != owner_of(k)) readers[{b, h / 2, k}].insert(owner_of(q));
          }
        }
      }
    }
  }
  int64_t group_cast = 0, ring = 0, all_gather = 0;
  for (const auto& [row, ranks] : readers) {
    const int owner = owner_of(std::get<2>(row)), P = request.ranks;
    int farthest = 0;
    for (const int r : ranks) farthest = std::max(farthest, (r - owner + P) % P);
    group_cast += 2 * static_cast<int64_t>(ranks.size());
    ring += 2 * farthest;
    all_gather += 2 * (P - 1);
  }
  RC_ASSERT(rows_sent(request, pattern, ScheduleKind::kGroupCast) == group_cast);
  RC_ASSERT(rows_sent(request, pattern, ScheduleKind::kRing) == ring);
  RC_ASSERT(rows_sent(request, pattern, ScheduleKind::kAllGather) == all_gather);
}

// Dilated segments and documents that lie within ranks need no communication.
TEST(Plan, RankLocalPatternsSendNothing) {
  for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast}) {
    for (const char* text : {"{ kind = \"dilated\", segment_lengths = [512, 256], dilation_rates = [4, 1] }",
                             "{ kind = \"documents\", documents = [512, 500, 12, 1024, 2048] }"}) {
      PlanRequest request;
      request.shape = {1, 4, 4, 4096, 4096, 0};
      request.pattern = parse_pattern(text, "test");
      request.ranks = 8;
      if (request.pattern.documents.size() == 1) request.ranks = 2;
      request.schedule = schedule;
      for (int r = 0; r < request.ranks; ++r) {
        const Program program = make_program(request, r);
        for (const auto* steps : {&program.forward, &program.backward}) {
          const Traffic sum = traffic(program, *steps);
          EXPECT_EQ(sum.kv_messages + sum.grad_messages, 0) << text << to_string(schedule);
        }
      }
    }
  }
}

TEST(Plan, RingSendsEachBlockOnceAndHoldsTwo) {
  PlanRequest request;
  request.shape = {1, 2, 2, 64, 64, 0};
  request.schedule = ScheduleKind::kRing;
  request.layout = LayoutKind::kZigzag;
  request.ranks = 8;
  for (int r = 0; r < 8; ++r) {
    const Program program = make_program(request, r);
    const int64_t block = 2 * 2 * 64 / 8;  // K and V rows of one rank: 2 heads, 8 positions
    const Traffic forward = traffic(program, program.forward), backward = traffic(program, program.backward);
    EXPECT_EQ(forward.kv_messages, 2 * 7);
    EXPECT_EQ(forward.kv_rows, 7 * block);
    EXPECT_EQ(forward.grad_rows, 0);
    EXPECT_EQ(forward.peak_kv_rows, 3 * block);  // its own and two that travel
    EXPECT_EQ(backward.kv_rows, 6 * block);      // the last block is still held, and the own one is not received
    EXPECT_EQ(backward.grad_rows, 7 * block);
    EXPECT_EQ(backward.peak_kv_rows, 3 * block);
    EXPECT_EQ(backward.peak_grad_rows, 3 * block);
    EXPECT_GE(program.saved, 0);
    PlanRequest keeps_nothing = request;
    keeps_nothing.keep_last = false;
    const Program again = make_program(keeps_nothing, r);
    EXPECT_EQ(again.saved, -1);
    EXPECT_EQ(traffic(again, again.forward).kv_rows, 7 * block);
    EXPECT_EQ(traffic(again, again.backward).kv_rows, 7 * block);
  }
}

TEST(Plan, AllGatherSendsTheSameBytesAndHoldsTheSequence) {
  PlanRequest request;
  request.shape = {1, 2, 2, 64, 64, 0};
  request.ranks = 8;
  request.schedule = ScheduleKind::kAllGather;
  const Program program = make_program(request, 3);
  const Traffic forward = traffic(program, program.forward), backward = traffic(program, program.backward);
  const int64_t block = 2 * 2 * 64 / 8;
  EXPECT_EQ(forward.kv_rows, 7 * block);
  EXPECT_EQ(forward.peak_kv_rows, 8 * block);
  EXPECT_EQ(backward.kv_rows, 7 * block);
  EXPECT_EQ(backward.grad_rows, 7 * block);
  EXPECT_EQ(program.saved, -1);
}

TEST(Plan, ZigzagBalancesCausalWork) {
  PlanRequest request;
  request.shape = {1, 1, 1, 4096, 4096, 0};
  request.pattern.causal = true;
  request.schedule = ScheduleKind::kRing;
  request.layout = LayoutKind::kZigzag;
  request.ranks = 8;
  std::set<int64_t> work;
  for (int r = 0; r < 8; ++r) {
    const Program program = make_program(request, r);
    for (size_t s = 1; s < program.forward.size(); ++s) {
      int64_t pairs = 0;
      for (const Tile& t : program.forward[s].tiles) {
        EXPECT_TRUE(t.band.unbounded_above());  // only the rank's own block needs a mask
        pairs += t.query_rows.count * t.key_rows.count;
      }
      work.insert(pairs);
    }
  }
  EXPECT_EQ(work, std::set<int64_t>{512 * 512 / 2});
}

TEST(Plan, OnlyEqualRequestsShareCachedPrograms) {
  PlanRequest a;
  a.shape = {2, 4, 2, 100, 100, 0};
  a.ranks = 3;
  EXPECT_EQ(cached_plan(a, 1), cached_plan(PlanRequest(a), 1));
  // Any difference makes another request, which does not use the cached programs of this one.
  const auto differs = [&](auto change) {
    PlanRequest other = a;
    change(other);
    EXPECT_NE(other.text(), a.text());
    EXPECT_NE(cached_plan(other, 1), cached_plan(a, 1)) << a.text() << " | " << other.text();
    EXPECT_NE(cached_plan(other, 1)->digest.low, cached_plan(a, 1)->digest.low);
  };
  differs([](PlanRequest& r) { r.shape.batch = 1; });
  differs([](PlanRequest& r) { r.shape.heads = 2; });
  differs([](PlanRequest& r) { r.shape.kv_heads = 4; });
  differs([](PlanRequest& r) { r.shape.q_len = 99; });
  differs([](PlanRequest& r) { r.shape.k_len = 101; });
  differs([](PlanRequest& r) { r.shape.query_offset = 1; });
  differs([](PlanRequest& r) { r.pattern.causal = true; });
  differs([](PlanRequest& r) { r.layout = LayoutKind::kZigzag; });
  differs([](PlanRequest& r) { r.layout = LayoutKind::kBalanced, r.balance_by = causal_pattern(); });
  differs([](PlanRequest& r) { r.layout = LayoutKind::kPerDocument, r.balance_by = causal_pattern(); });
  differs([](PlanRequest& r) { r.schedule = ScheduleKind::kAllGather; });
  differs([](PlanRequest& r) { r.ranks = 4; });
  differs([](PlanRequest& r) { r.within = 3; });
  differs([](PlanRequest& r) { r.uneven_lengths = {50, 30, 20}; });
  differs([](PlanRequest& r) { r.keep_last = false; });
  // `even` changes no plan, so ranks may differ in it, but it is checked although the plan is there.
  a.ranks = 4;
  PlanRequest even = a;
  even.even = true;
  EXPECT_EQ(cached_plan(even, 1)->program.forward, cached_plan(a, 1)->program.forward);
  a.ranks = even.ranks = 3;
  cached_plan(a, 1);
  EXPECT_THROW(cached_plan(even, 1), Error);
}

// Requests are compared by their values, and ranks compare the digests of their texts: a copy is the same request, even
// if its block map lies elsewhere, and both have one digest.
RC_GTEST_PROP(Plan, EqualRequestsHaveOnePlanAndOneDigest, ()) {
  const PlanRequest a = testing::any_request();
  PlanRequest b = a;
  if (b.pattern.blocks.given) {
    b.pattern.blocks.given = std::make_shared<const BlockMap>(*a.pattern.blocks.given);
  }
  RC_ASSERT(a == b);
  RC_ASSERT((PlanKey{a, 0}.hash() == PlanKey{b, 0}.hash()));
  RC_ASSERT(cached_plan(a, 0) == cached_plan(b, 0));
  const PlanRequest other = testing::any_request();
  if (a == other) RC_ASSERT(a.text() == other.text());
  const Digest one = cached_plan(a, 0)->digest, two = cached_plan(other, 0)->digest;
  RC_ASSERT((one.high == two.high && one.low == two.low) == (a.text() == other.text()));
}

// A second step with the same patterns makes no plan, and the plan of the next step's documents can be made in the
// background.
TEST(Plan, PlansAreReusedAndPlanAheadFillsTheCache) {
  PlanRequest request;
  request.shape = {1, 4, 2, 321, 321, 0};
  request.pattern = parse_pattern("{ kind = \"dilated\", segment_lengths = [32], dilation_rates = [2] }", "test");
  request.ranks = 2;
  cached_plan(request, 0);
  const PlanStats before = plan_stats();
  for (int i = 0; i < 3; ++i) cached_plan(request, 0);
  PlanStats after = plan_stats();
  EXPECT_EQ(after.programs_made, before.programs_made);
  EXPECT_EQ(after.patterns_made, before.patterns_made);
  EXPECT_EQ(after.programs.hits, before.programs.hits + 3);
  cached_plan(request, 1);  // another rank's program of the same slices
  EXPECT_EQ(plan_stats().patterns_made, before.patterns_made);

  request.pattern.documents = {{100, 221}};
  plan_ahead(request, 0, /*prove=*/false);
  const auto plan = cached_plan(request, 0);  // made or being made by the other thread; it is made only once
  after = plan_stats();
  EXPECT_EQ(after.programs_made, before.programs_made + 2);
  EXPECT_EQ(cached_plan(request, 0), plan);
  request.pattern.documents = {{100, 222}};
  plan_ahead(request, 0, /*prove=*/false);  // fails in the other thread
  EXPECT_THROW(cached_plan(request, 0), Error);
}

TEST(Plan, EqualSegmentsIsEnforced) {
  PlanRequest request;
  request.shape = {1, 4, 2, 96, 96, 0};
  request.ranks = 2;
  request.pattern = parse_pattern(
      "{ kind = \"dilated\", segment_lengths = [16, 32], dilation_rates = [1, 2], equal_segments = true }", "test");
  try {
    validate(request);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPlan);
    EXPECT_NE(std::string(error.what()).find("64 or 128"), std::string::npos) << error.what();
  }
  request.shape.q_len = request.shape.k_len = 128;
  validate(request);
  request.shape.k_len = 96;
  EXPECT_THROW(validate(request), Error) << "of the keys as well";
  request.pattern.dilated.equal_segments = false;
  request.shape.q_len = request.shape.k_len = 97;
  EXPECT_NO_THROW(make_program(request, 1));
}

}  // namespace
}  // namespace annulus::plan_test
