// Tests the layouts that are dealt by a pattern: how work is counted, what ranks get, and what a request says of it.
#include "attention/plan/balance.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "attention/plan/needs.h"
#include "attention/plan/part_dealer.h"
#include "attention/plan/plan.h"
#include "attention/testing/any_pattern.h"
#include "common/error.h"

namespace annulus::balance_test {
namespace {

using testing::any_documents;
using testing::any_pattern;

AttentionShape shape_of(int64_t length, int64_t batch = 1) {
  return {.batch = batch, .heads = 1, .kv_heads = 1, .q_len = length, .k_len = length, .query_offset = 0};
}

PatternSpec packed(std::vector<std::vector<int64_t>> documents) {
  PatternSpec spec = causal_pattern();
  spec.documents = std::move(documents);
  return spec;
}

PlanRequest balanced(const PatternSpec& pattern, const AttentionShape& shape, int ranks) {
  PlanRequest request;
  request.shape = shape;
  request.pattern = pattern;
  request.layout = LayoutKind::kBalanced;
  request.ranks = ranks;
  return request;
}

bool pairs_with(const Slice& slice, int64_t query, int64_t key) {
  return slice.queries.contains(query) && slice.keys.contains(key) && slice.band.contains(query, key);
}

// The most pairs of a rank over their mean.
double most_over_mean(const Layout& layout, const PositionWork& work) {
  int64_t most = 0;
  for (const std::vector<Span>& spans : layout.spans) {
    int64_t own = 0;
    for (const Span& s : spans) {
      own += work.before[static_cast<size_t>(s.last() + 1)] - work.before[static_cast<size_t>(s.begin)];
    }
    most = std::max(most, own);
  }
  return static_cast<double>(most) * layout.ranks() / static_cast<double>(work.before.back());
}

// Lengths between 1 and `most`, the long ones rarer, that fill a row.
std::vector<int64_t> drawn_lengths(int64_t length, int64_t most) {
  std::vector<int64_t> lengths;
  for (int64_t left = length; left > 0; left -= lengths.back()) {
    const int64_t cap = std::max<int64_t>(1, most >> *rc::gen::inRange(0, 8));
    lengths.push_back(std::min(left, *rc::gen::inRange<int64_t>(cap / 2 + 1, cap + 2)));
  }
  return lengths;
}

RC_GTEST_PROP(Balance, WorkIsThePairsOfEachQuery, ()) {
  AttentionShape shape = shape_of(*rc::gen::inRange<int64_t>(0, 100), *rc::gen::inRange(1, 3));
  shape.heads = *rc::gen::inRange(1, 4);
  if (*rc::gen::inRange(0, 3) == 0) shape.k_len = *rc::gen::inRange<int64_t>(0, 100);
  const Pattern pattern = make_pattern(any_pattern(shape), shape);
  const PositionWork work = position_work(pattern);
  RC_ASSERT(static_cast<int64_t>(work.before.size()) == shape.q_len + 1);
  RC_ASSERT(work.before[0] == 0);
  for (int64_t q = 0; q < shape.q_len; ++q) {
    int64_t pairs = 0;
    for (const Slice& s : pattern.slices) {
      for (int64_t k = 0; k < shape.k_len; ++k) pairs += pairs_with(s, q, k) ? s.batch.count * s.heads.count : 0;
    }
    RC_ASSERT(work.before[static_cast<size_t>(q + 1)] - work.before[static_cast<size_t>(q)] == pairs);
  }
}

// What a cut costs is exact for a slice without strides: the needed keys on the other side, once each.
RC_GTEST_PROP(Balance, CrossingsAreTheKeysThatACutSeparates, ()) {
  const int64_t n = *rc::gen::inRange<int64_t>(1, 40);
  const auto any_range = [&] {
    const int64_t begin = *rc::gen::inRange<int64_t>(0, n);
    return Span::range(begin, *rc::gen::inRange<int64_t>(begin + 1, n + 1));
  };
  Slice slice{{0, 1, 1}, {0, 1, 1}, any_range(), any_range(), {}, -1};
  if (*rc::gen::arbitrary<bool>()) slice.band.lo = *rc::gen::inRange<int64_t>(-n, n);
  if (*rc::gen::arbitrary<bool>()) slice.band.hi = *rc::gen::inRange<int64_t>(-n, n);
  const PositionWork work = position_work({shape_of(n), {slice}});
  for (int64_t cut = 0; cut <= n; ++cut) {
    std::set<int64_t> apart;
    for (int64_t q = 0; q < n; ++q) {
      for (int64_t k = 0; k < n; ++k) {
        if ((q < cut) != (k < cut) && pairs_with(slice, q, k)) apart.insert(k);
      }
    }
    RC_ASSERT(work.crossing[static_cast<size_t>(cut)] == static_cast<int64_t>(apart.size()));
  }
}

RC_GTEST_PROP(Balance, EveryPositionHasOneOwnerAndRanksAsManyAsContiguous, ()) {
  AttentionShape shape = shape_of(*rc::gen::inRange<int64_t>(0, 300));
  if (*rc::gen::inRange(0, 4) == 0) shape.k_len = *rc::gen::inRange<int64_t>(0, 100);
  const int ranks = *rc::gen::inRange(1, 18);
  PlanRequest request = balanced(any_pattern(shape), shape, ranks);
  request.layout = *rc::gen::element(LayoutKind::kBalanced, LayoutKind::kPerDocument);
  const Layout layout = query_layout(request);
  RC_ASSERT(layout.ranks() == ranks);
  std::vector<int64_t> all, counts;
  for (int r = 0; r < ranks; ++r) {
    const std::vector<int64_t> own = layout.positions(r);
    RC_ASSERT(std::is_sorted(own.begin(), own.end()));
    all.insert(all.end(), own.begin(), own.end());
    counts.push_back(layout.count(r));
  }
  RC_ASSERT(counts == layout_counts(request.layout, shape.q_len, ranks));
  RC_ASSERT(counts == layout_counts(LayoutKind::kContiguous, shape.q_len, ranks));
  std::sort(all.begin(), all.end());
  std::vector<int64_t> every(static_cast<size_t>(shape.q_len));
  std::iota(every.begin(), every.end(), 0);
  RC_ASSERT(all == every);
  const Layout keys = key_layout(request);
  RC_ASSERT(keys.length == shape.k_len);
  if (shape.k_len == shape.q_len) {
    RC_ASSERT(keys.spans == layout.spans);
  } else {
    RC_ASSERT(keys.spans == make_layout(LayoutKind::kContiguous, shape.k_len, ranks).spans);
  }
  // Made again, it is the same.
  const Pattern pattern = make_pattern(request.pattern, shape);
  RC_ASSERT(balanced_layout(pattern, ranks).spans == balanced_layout(pattern, ranks).spans);
}

// The sums over two rows, whose documents begin at other positions, are as even as those over one.
RC_GTEST_PROP(Balance, PairsOfPackedRowsAreEven, ()) {
  const int ranks = *rc::gen::element(2, 3, 8, 13, 32);
  const int64_t length = 2 * kBalanceChunk * ranks * *rc::gen::inRange(1, 5) + *rc::gen::inRange(0, 100);
  const int64_t batch = *rc::gen::inRange(1, 3);
  const AttentionShape shape = shape_of(length, batch);
  std::vector<std::vector<int64_t>> documents;
  for (int64_t b = 0; b < batch; ++b) documents.push_back(drawn_lengths(length, length));
  const Pattern pattern = make_pattern(packed(documents), shape);
  const Layout layout = balanced_layout(pattern, ranks);
  const double most = most_over_mean(layout, position_work(pattern));
  RC_ASSERT(most <= 1.05);
}

TEST(Balance, ACausalRowIsDealtAsByZigzag) {
  for (const int ranks : {2, 4, 8}) {
    const AttentionShape shape = shape_of(2 * kBalanceChunk * ranks);
    const Layout zigzag = make_layout(LayoutKind::kZigzag, shape.q_len, ranks);
    const Pattern pattern = make_pattern(causal_pattern(), shape);
    const Layout layout = balanced_layout(pattern, ranks);
    EXPECT_LE(most_over_mean(layout, position_work(pattern)), 1.05);
    size_t pieces = 0;
    for (const std::vector<Span>& spans : layout.spans) pieces += spans.size();
    EXPECT_LE(pieces, 2 * static_cast<size_t>(ranks));
    Needs mine(pattern, layout, layout), theirs(pattern, zigzag, zigzag);
    EXPECT_LE(static_cast<double>(mine.foreign_rows()), 1.10 * static_cast<double>(theirs.foreign_rows()));
  }
}

// Lengths as those of packed rows, drawn without the library, because its draws differ from seed to seed: `some` of
// them from 100 on, and of each `every` one from `long_from` on.
std::vector<int64_t> fixed_lengths(int64_t length, uint64_t seed, int64_t some, int64_t every, int64_t long_from,
                                   int64_t more) {
  std::vector<int64_t> lengths;
  uint64_t x = seed;
  for (int64_t left = length; left > 0; left -= lengths.back()) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    const auto u = static_cast<int64_t>(x >> 40);
    const int64_t n =
        every > 0 && u % every == 0 ? long_from + u / every % more : 100 + u / std::max<int64_t>(1, every) % some;
    lengths.push_back(std::min(n, left));
  }
  return lengths;
}

// Returns the rows that a group-cast sends with the balanced layout, over those with zigzag.
double rows_over_zigzag(const std::vector<int64_t>& lengths, int64_t length, int ranks) {
  const AttentionShape shape = shape_of(length);
  const Pattern pattern = make_pattern(packed({lengths}), shape);
  const Layout layout = balanced_layout(pattern, ranks), zigzag = make_layout(LayoutKind::kZigzag, length, ranks);
  EXPECT_LE(most_over_mean(layout, position_work(pattern)), 1.05);
  Needs mine(pattern, layout, layout), theirs(pattern, zigzag, zigzag);
  return static_cast<double>(mine.foreign_rows()) / static_cast<double>(theirs.foreign_rows());
}

// Documents that are much shorter than a rank's part are packed whole, up to a few tokens.
// Of causal documents, the most pairs of a rank's queries with the keys that reach it in a step of a ring, over the
// mean of the ranks, for the step in which this is the most.
double worst_step_over_mean(const Layout& layout, const std::vector<int64_t>& documents) {
  const int ranks = layout.ranks();
  std::vector<int> owner(static_cast<size_t>(layout.length));
  for (int r = 0; r < ranks; ++r) {
    for (const int64_t x : layout.positions(r)) owner[static_cast<size_t>(x)] = r;
  }
  std::vector<std::vector<double>> pairs(static_cast<size_t>(ranks), std::vector<double>(static_cast<size_t>(ranks)));
  size_t begin = 0;
  for (const int64_t length : documents) {
    for (size_t q = begin; q < begin + static_cast<size_t>(length); ++q) {
      for (size_t k = begin; k <= q; ++k) {
        const int step = (owner[q] - owner[k] + ranks) % ranks;
        ++pairs[static_cast<size_t>(step)][static_cast<size_t>(owner[q])];
      }
    }
    begin += static_cast<size_t>(length);
  }
  double worst = 1;
  for (const std::vector<double>& step : pairs) {
    const double all = std::accumulate(step.begin(), step.end(), 0.0);
    if (all > 0) worst = std::max(worst, *std::max_element(step.begin(), step.end()) * ranks / all);
  }
  return worst;
}

// The pieces of a rank differ from another's by a token, of at least kLeastPiece: pairs by (1 + 1 / kLeastPiece)^2.
RC_GTEST_PROP(Balance, EachStepOfARingOverDocumentsIsEven, ()) {
  const int ranks = *rc::gen::inRange(2, 5);
  std::vector<int64_t> documents;
  for (int i = *rc::gen::inRange(1, 5); i > 0; --i) {
    documents.push_back(2 * ranks * kLeastPiece + *rc::gen::inRange<int64_t>(0, 300));
  }
  const int64_t length = std::accumulate(documents.begin(), documents.end(), int64_t{0});
  PlanRequest request = balanced(packed({documents}), shape_of(length), ranks);
  request.layout = LayoutKind::kPerDocument;
  const Layout layout = query_layout(request);
  RC_ASSERT(worst_step_over_mean(layout, documents) < 1.04);
  std::vector<int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(layout.count(r));
  RC_ASSERT(counts == layout_counts(LayoutKind::kContiguous, length, ranks));
}

// Documents too short to be cut among all ranks lie beside long ones.
RC_GTEST_PROP(Balance, ShortDocumentsFillRanksUpBesideLongOnes, ()) {
  const int ranks = *rc::gen::inRange(2, 5);
  std::vector<int64_t> documents = drawn_lengths(*rc::gen::inRange<int64_t>(0, 1500), 2 * ranks * kLeastPiece + 99);
  documents.push_back(2 * ranks * kLeastPiece + *rc::gen::inRange<int64_t>(0, 300));
  const int64_t length = std::accumulate(documents.begin(), documents.end(), int64_t{0});
  PlanRequest request = balanced(packed({documents}), shape_of(length), ranks);
  request.layout = LayoutKind::kPerDocument;
  std::vector<int64_t> counts, all;
  const Layout layout = query_layout(request);
  for (int r = 0; r < ranks; ++r) {
    counts.push_back(layout.count(r));
    const std::vector<int64_t> own = layout.positions(r);
    all.insert(all.end(), own.begin(), own.end());
  }
  RC_ASSERT(counts == layout_counts(LayoutKind::kContiguous, length, ranks));
  std::sort(all.begin(), all.end());
  std::vector<int64_t> every(static_cast<size_t>(length));
  std::iota(every.begin(), every.end(), 0);
  RC_ASSERT(all == every);
}

TEST(Balance, PerDocumentDealsARowOfOneDocumentAsZigzag) {
  PlanRequest request = balanced(causal_pattern(), shape_of(4096), 4);
  request.layout = LayoutKind::kPerDocument;
  EXPECT_EQ(query_layout(request).spans, make_layout(LayoutKind::kZigzag, 4096, 4).spans);
}

// Where zigzag cuts the row as one, some ranks have nothing to do in most steps.
TEST(Balance, AZigzagRingOverDocumentsWaitsWhereOnePerDocumentDoesNot) {
  const std::vector<int64_t> documents = {2000, 600, 900, 596};
  PlanRequest request = balanced(packed({documents}), shape_of(4096), 4);
  EXPECT_GT(worst_step_over_mean(make_layout(LayoutKind::kZigzag, 4096, 4), documents), 2);
  request.layout = LayoutKind::kPerDocument;
  EXPECT_LT(worst_step_over_mean(query_layout(request), documents), 1.04);
}

TEST(Balance, ShortDocumentsAreHardlyCut) {
  for (const int ranks : {8, 16, 64}) {
    const int64_t length = int64_t{ranks} * 2048;
    EXPECT_LE(rows_over_zigzag(fixed_lengths(length, 1, 900, 0, 0, 1), length, ranks), 0.05) << ranks;
  }
}

// Documents with more work than a rank are cut at their ends, and the rest is packed. Other layouts that are as even,
// such as arcs of a circle, send more rows than zigzag here, whose most loaded rank has twice the mean.
TEST(Balance, LongDocumentsAmongShortOnesSendNoMoreThanZigzag) {
  for (const int ranks : {8, 32, 64}) {
    const int64_t length = int64_t{ranks} * 2048;
    EXPECT_LE(rows_over_zigzag(fixed_lengths(length, 2, 700, 8, 1500, 3000), length, ranks), 1.0) << ranks;
  }
}

// However parts lie, every way to deal them gives each position to one rank, and each rank its share.
RC_GTEST_PROP(Balance, EveryWayToDealPartsCoversThemOnce, ()) {
  const int64_t length = *rc::gen::inRange<int64_t>(1, 3000);
  const int ranks = *rc::gen::inRange(2, 18);
  const std::vector<int64_t> lengths = drawn_lengths(length, length);
  const PositionWork work = position_work(make_pattern(packed({lengths}), shape_of(length)));
  Stretches parts;
  int64_t begin = 0;
  for (const int64_t n : lengths) parts.push_back({begin, begin + n}), begin += n;
  for (const std::vector<Stretches>& way : deal_parts(work.before, parts, ranks)) {
    RC_ASSERT(way.size() == static_cast<size_t>(ranks));
    Stretches all;
    for (int r = 0; r < ranks; ++r) {
      int64_t tokens = 0;
      for (const Stretch& p : way[static_cast<size_t>(r)]) tokens += p.end - p.begin, all.push_back(p);
      RC_ASSERT(tokens == (r + 1) * length / ranks - r * length / ranks);
    }
    std::sort(all.begin(), all.end(), [](const Stretch& a, const Stretch& b) { return a.begin < b.begin; });
    int64_t end = 0;
    for (const Stretch& p : all) {
      RC_ASSERT(p.begin == end && p.end > p.begin);
      end = p.end;
    }
    RC_ASSERT(end == length);
  }
}

TEST(Balance, DocumentsThatFitAreNotCut) {
  const AttentionShape shape = shape_of(4096);
  const Pattern pattern = make_pattern(packed({std::vector<int64_t>(16, 256)}), shape);
  const Layout layout = balanced_layout(pattern, 4);
  Needs needs(pattern, layout, layout);
  EXPECT_EQ(static_cast<int64_t>(needs.foreign_rows()), 0);
  EXPECT_EQ(most_over_mean(layout, position_work(pattern)), 1.0);
}

// One long document among short ones: zigzag gives most of its pairs to few ranks.
TEST(Balance, ALongDocumentIsSharedByAllRanks) {
  std::vector<int64_t> documents(96, 128);
  documents.insert(documents.begin() + 40, 4096);
  const AttentionShape shape = shape_of(96 * 128 + 4096);
  const Pattern pattern = make_pattern(packed({documents}), shape);
  const PositionWork work = position_work(pattern);
  EXPECT_GT(most_over_mean(make_layout(LayoutKind::kZigzag, shape.q_len, 8), work), 2);
  EXPECT_LE(most_over_mean(balanced_layout(pattern, 8), work), 1.05);
}

TEST(Balance, LayoutsWithoutWorkOrWithFewPositionsAreDealt) {
  PatternSpec nothing;
  nothing.kind = PatternSpec::Kind::kSlices;
  EXPECT_EQ(query_layout(balanced(nothing, shape_of(10), 3)).count(2), 4);
  EXPECT_EQ(query_layout(balanced(causal_pattern(), shape_of(3), 8)).ranks(), 8);
  EXPECT_EQ(query_layout(balanced(causal_pattern(), shape_of(0), 8)).count(7), 0);
  EXPECT_THROW(balanced_layout(make_pattern(causal_pattern(), shape_of(4)), 0), Error);
  EXPECT_THROW(make_layout(LayoutKind::kBalanced, 8, 2), Error);
  EXPECT_THROW(make_layout(LayoutKind::kPerDocument, 8, 2), Error);
}

TEST(Balance, CallsWithDifferentPatternsShareALayout) {
  const AttentionShape shape = shape_of(2048);
  const PatternSpec whole = packed({{1500, 548}}),
                    window = parse_pattern("{ kind = \"window\", left = 63, right = 0 }", "test");
  PlanRequest one = balanced(whole, shape, 4), other = balanced(window, shape, 4);
  EXPECT_NE(query_layout(one).spans, query_layout(other).spans);
  const std::string alone = one.text();
  one.balance_by = other.balance_by = balanced_together({whole, window, window, whole});
  EXPECT_EQ(one.balance_by->members.size(), 2u);
  EXPECT_EQ(query_layout(one).spans, query_layout(other).spans);
  EXPECT_NE(one.text(), alone);
  PlanRequest by_window = one;
  by_window.balance_by = window;
  EXPECT_NE(one.text(), by_window.text());
  EXPECT_FALSE(one == by_window);
  // Other layouts do not depend on it.
  one.layout = by_window.layout = LayoutKind::kZigzag;
  EXPECT_EQ(one.text(), by_window.text());
  EXPECT_EQ(balanced_together({window, window}), window);
  EXPECT_EQ(balanced_together({window, whole, window}).members.size(), 3u);
}

// What a union may not contain by itself: branches of which the mean is taken, and unions within unions.
TEST(Balance, LayersOfAnyKindShareALayout) {
  AttentionShape shape = shape_of(2048);
  shape.heads = 2;  // one for each branch
  const PatternSpec mean = parse_pattern(
      "{ kind = \"dilated\", segment_lengths = [64, 512], dilation_rates = [1, 2], combine = \"mean\" }", "test");
  const PatternSpec whole = packed({{1500, 548}});
  PatternSpec nested;
  nested.kind = PatternSpec::Kind::kUnion;
  nested.members = {parse_pattern("{ kind = \"window\", left = 63, right = 0 }", "test"), whole};
  const PatternSpec together = balanced_together({mean, nested, whole});
  EXPECT_EQ(together.members.size(), 4u);
  PlanRequest request = balanced(mean, shape, 4);
  request.balance_by = together;
  validate(request);
}

// Neither the bits of a mask, of which ranks hold different parts, nor the selection of an adaptive map is known to all
// ranks before a call.
TEST(Balance, MasksAndAdaptiveMapsAreNotRead) {
  const AttentionShape shape = shape_of(2048);
  PatternSpec masked = causal_pattern();
  masked.mask.digest = "of a mask that no rank has";
  EXPECT_EQ(query_layout(balanced(masked, shape, 4)).spans, query_layout(balanced(causal_pattern(), shape, 4)).spans);
  const PatternSpec adaptive =
      parse_pattern("{ kind = \"blocks\", causal = true, map = \"adaptive\", block = 128, keep = 2 }", "test");
  const PlanRequest request = balanced(adaptive, shape, 4);
  const Pattern nearest = make_pattern(with_nearest_blocks(adaptive, shape), shape);
  EXPECT_EQ(query_layout(request).spans, balanced_layout(nearest, 4).spans);
}

// What is cut before a call, such as tokens, has no heads, and the ranks of a data axis have other rows.
TEST(Balance, HeadsAndRowsThatAreAlikeDoNotMoveCuts) {
  const PatternSpec spec = packed({{900, 40, 3, 1000, 57, 300, 1200, 596}});
  AttentionShape shape = shape_of(4096);
  const Layout one = query_layout(balanced(spec, shape, 8));
  shape.batch = 3, shape.heads = 28, shape.kv_heads = 7;
  EXPECT_EQ(query_layout(balanced(spec, shape, 8)).spans, one.spans);
}

TEST(Balance, SlicesOfAllRowsAndHeadsAreDealtAsOne) {
  const PatternSpec all = parse_pattern(
      "{ kind = \"slices\", slices = [{ queries = [0, 1, 4096], keys = [0, 1, 4096], hi = 0 }] }", "test");
  AttentionShape shape = shape_of(4096);
  shape.batch = 3, shape.heads = 2;
  EXPECT_EQ(query_layout(balanced(all, shape, 4)).spans, query_layout(balanced(causal_pattern(), shape, 4)).spans);
}

TEST(Balance, EvenNeedsAMultipleOfTheRanks) {
  PlanRequest request = balanced(causal_pattern(), shape_of(2050), 4);
  request.even = true;
  EXPECT_THROW(validate(request), Error);
  request.shape = shape_of(2052);  // not a multiple of 2 P
  validate(request);
}

}  // namespace
}  // namespace annulus::balance_test
