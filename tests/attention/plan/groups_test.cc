// Tests the schedules over inner groups of ranks, double-ring and group-cast: what they send inside and between groups,
// against counting row by row.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "attention/plan/choice.h"
#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
#include "attention/proof/verifier.h"
#include "attention/testing/any_request.h"
#include "common/error.h"

namespace annulus::groups_test {
namespace {

// Rows of K sent by all ranks; as many of V are sent.
struct Sent {
  int64_t keys_inside = 0, keys_between = 0, gradients_inside = 0, gradients_between = 0;
  friend bool operator==(const Sent&, const Sent&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Sent& s) {
    return out << s.keys_inside << " " << s.keys_between << " " << s.gradients_inside << " " << s.gradients_between;
  }
};

const std::vector<Step>& steps_of(const Program& p, bool backward) { return backward ? p.backward : p.forward; }

Sent sent(const std::vector<Program>& programs, int within, bool backward) {
  Sent sum;
  for (const Program& p : programs) {
    for (const Step& step : steps_of(p, backward)) {
      for (const Transfer& t : step.sends) {
        const bool inside = t.peer / within == p.rank / within;
        const bool gradient = p.buffers[static_cast<size_t>(t.buffer)].holds_sums();
        (gradient ? inside ? sum.gradients_inside : sum.gradients_between
         : inside ? sum.keys_inside
                  : sum.keys_between) += t.rows.rows();
      }
    }
  }
  return sum;
}

std::vector<int> rank_of_positions(const Layout& layout) {
  std::vector<int> ranks(static_cast<size_t>(layout.length));
  for (int r = 0; r < layout.ranks(); ++r) {
    for (const int64_t x : layout.positions(r)) ranks[static_cast<size_t>(x)] = r;
  }
  return ranks;
}

// A row that other ranks than its owner read.
struct Row {
  int owner;
  std::set<int> readers;
};

// Rows are sent for the pairs of slices, also for those that a mask of tokens hides within them.
std::vector<Row> rows_that_travel(const PlanRequest& request) {
  const std::vector<int> of_query = rank_of_positions(query_layout(request));
  const std::vector<int> of_key = rank_of_positions(key_layout(request));
  const int64_t group = request.shape.heads / request.shape.kv_heads;
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::set<int>> readers;  // by batch row, kv head and key
  for (const Slice& slice : cached_pattern(request)->slices) {
    for (int64_t k = 0; k < slice.keys.count; ++k) {
      std::set<int> of_slice;
      for (int64_t q = 0; q < slice.queries.count; ++q) {
        if (slice.band.contains(slice.queries.at(q), slice.keys.at(k))) {
          of_slice.insert(of_query[static_cast<size_t>(slice.queries.at(q))]);
        }
      }
      for (int64_t b = 0; b < slice.batch.count; ++b) {
        for (int64_t h = 0; h < slice.heads.count; ++h) {
          readers[{slice.batch.at(b), slice.heads.at(h) / group, slice.keys.at(k)}].insert(of_slice.begin(),
                                                                                           of_slice.end());
        }
      }
    }
  }
  std::vector<Row> rows;
  for (auto& [row, ranks] : readers) {
    const int owner = of_key[static_cast<size_t>(std::get<2>(row))];
    ranks.erase(owner);
    if (!ranks.empty()) rows.push_back({owner, ranks});
  }
  return rows;
}

// The way of blocks over the ranks: the turn and the visit in it in which a rank has the block of an owner, forwards
// or, beginning with what was kept, backwards.
struct Way {
  int ranks, within;
  bool reversed;

  int turns() const { return ranks / within; }
  std::pair<int, int> visit(int owner, int reader) const {
    const int up = (reader / within - owner / within + turns()) % turns();
    const int along = (reader % within - owner % within + within) % within;
    if (!reversed) return {up, along};
    return {(2 * turns() - 1 - up) % turns(), (2 * within - 1 - along) % within};
  }
  // By turn: the visits of a row's readers.
  std::map<int, std::set<int>> visits(const Row& row) const {
    std::map<int, std::set<int>> by_turn;
    for (const int reader : row.readers) {
      const auto [turn, place] = visit(row.owner, reader);
      by_turn[turn].insert(place);
    }
    return by_turn;
  }
};

Sent of_double_ring(const std::vector<Row>& rows, const Way& way) {
  const int own = way.reversed ? way.turns() - 1 : 0;
  std::map<std::pair<int, int>, int> last;  // by owner and turn: the last visit of a rank that needs any of its rows
  for (const Row& row : rows) {
    for (const auto& [turn, places] : way.visits(row)) {
      int& visit = last[{row.owner, turn}];
      visit = std::max(visit, *places.rbegin());
    }
  }
  Sent sum;
  for (const Row& row : rows) {
    int farthest = 0;
    for (const auto& [turn, places] : way.visits(row)) {
      // Backwards, the block of the last turn comes from the owner to the first rank of the turn.
      sum.keys_inside += *places.rbegin() + (way.reversed && turn == own ? 1 : 0);
      if (turn != own) farthest = std::max(farthest, turn);
      sum.gradients_inside += last[{row.owner, turn}] - *places.begin() + (turn == own ? 1 : 0);
      sum.gradients_between += turn == own ? 0 : 1;
    }
    sum.keys_between += farthest;
  }
  return sum;
}

Sent of_group_cast(const std::vector<Row>& rows, int within) {
  Sent sum;
  for (const Row& row : rows) {
    std::set<int> groups;
    for (const int reader : row.readers) {
      const bool enters = reader / within != row.owner / within && reader % within == row.owner % within;
      sum.keys_inside += enters ? 0 : 1;
      if (reader / within != row.owner / within) groups.insert(reader / within);
    }
    sum.keys_between += static_cast<int64_t>(groups.size());
  }
  sum.gradients_inside = sum.keys_inside, sum.gradients_between = sum.keys_between;
  return sum;
}

Sent keys_alone(Sent sum) {
  sum.gradients_inside = sum.gradients_between = 0;
  return sum;
}

// A request of at least two ranks with groups of fewer than all of them.
PlanRequest any_groups(ScheduleKind schedule) {
  PlanRequest request = testing::any_request();
  if (request.ranks == 1) request.ranks = 6, request.uneven_lengths.clear();
  request.schedule = schedule;
  std::vector<int> fitting;
  for (int n = 1; n < request.ranks; ++n) {
    if (request.ranks % n == 0) fitting.push_back(n);
  }
  request.within = *rc::gen::elementOf(fitting);
  return request;
}

RC_GTEST_PROP(DoubleRing, SendsWhatLaterVisitsNeed, ()) {
  const PlanRequest request = any_groups(ScheduleKind::kDoubleRing);
  const std::vector<Row> rows = rows_that_travel(request);
  const Way way{request.ranks, request.within, false};
  const int last_turn = way.turns() - 1, last_place = request.within - 1;
  const bool reversed = request.keep_last && std::all_of(rows.begin(), rows.end(), [&](const Row& row) {
                          const auto visits = way.visits(row);
                          return visits.rbegin()->first == 0 ||
                                 (visits.count(last_turn) > 0 && visits.at(last_turn).count(last_place) > 0);
                        });
  const std::vector<Program> programs = make_programs(request);
  RC_ASSERT(verify(programs).faults == std::vector<std::string>{});
  RC_ASSERT(sent(programs, request.within, false) == keys_alone(of_double_ring(rows, way)));
  RC_ASSERT(sent(programs, request.within, true) == of_double_ring(rows, Way{request.ranks, request.within, reversed}));
}

RC_GTEST_PROP(GroupCast, SendsEachGroupOneCopyOfARow, ()) {
  const PlanRequest request = any_groups(ScheduleKind::kGroupCast);
  const std::vector<Row> rows = rows_that_travel(request);
  const std::vector<Program> programs = make_programs(request);
  RC_ASSERT(verify(programs).faults == std::vector<std::string>{});
  const Sent expected = of_group_cast(rows, request.within);
  RC_ASSERT(sent(programs, request.within, false) == keys_alone(expected));
  RC_ASSERT(sent(programs, request.within, true) == expected);
}

PlanRequest full(ScheduleKind schedule, int within) {
  PlanRequest request;
  request.shape = {1, 2, 2, 96, 96, 0};
  request.ranks = 12;
  request.schedule = schedule;
  request.within = within;
  return request;
}

// How many transfers of keys, or of gradients, a rank sends to other groups in the steps [first, past).
int64_t crossing(const Program& p, const std::vector<Step>& steps, size_t first, size_t past, bool gradients) {
  int64_t n = 0;
  for (size_t s = first; s < std::min(past, steps.size()); ++s) {
    for (const Transfer& t : steps[s].sends) {
      const bool between = t.peer / p.request.within != p.rank / p.request.within;
      n += between && p.buffers[static_cast<size_t>(t.buffer)].holds_sums() == gradients;
    }
  }
  return n;
}

TEST(DoubleRing, EveryRankSendsOneBlockToAnotherGroupInATurn) {
  constexpr size_t L = 4, H = 3;
  const int64_t block = 2 * 2 * 96 / 12;  // rows of K and V of one rank
  for (const bool keep : {false, true}) {
    PlanRequest request = full(ScheduleKind::kDoubleRing, static_cast<int>(L));
    request.keep_last = keep;
    for (const Program& p : make_programs(request)) {
      ASSERT_EQ(p.saved >= 0, keep);
      for (size_t turn = 0; turn < H; ++turn) {
        const size_t begin = turn * L, past = begin + L;
        EXPECT_EQ(crossing(p, p.forward, begin, past, false), turn + 1 < H ? 1 : 0);
        // What was kept begins the backward in another group, so the owner's group is the last one.
        EXPECT_EQ(crossing(p, p.backward, begin, past, false), turn + (keep ? 2 : 1) < H ? 1 : 0);
        // A turn's sum leaves in the step after the turn's last visit.
        const bool own = turn == (keep ? H - 1 : 0);
        EXPECT_EQ(crossing(p, p.backward, begin + 1, past + 1, true), own ? 0 : 1);
      }
      const Traffic forward = traffic(p, p.forward), backward = traffic(p, p.backward);
      EXPECT_EQ(forward.kv_rows, 11 * block);
      EXPECT_EQ(forward.peak_kv_rows, 4 * block);  // its own, the visiting, and the next of this turn and of the next
      EXPECT_EQ(backward.kv_rows, (keep ? 10 : 11) * block);
      EXPECT_EQ(backward.grad_rows, 11 * block);
      EXPECT_LE(backward.peak_kv_rows, 4 * block);
      EXPECT_LE(backward.peak_grad_rows, 4 * block);
    }
  }
}

// Without groups, or with one, the double ring is the ring.
TEST(DoubleRing, OfOneGroupIsTheRing) {
  const std::vector<Program> ring = make_programs(full(ScheduleKind::kRing, 0));
  for (const int within : {0, 12}) {
    const std::vector<Program> programs = make_programs(full(ScheduleKind::kDoubleRing, within));
    for (size_t r = 0; r < programs.size(); ++r) {
      EXPECT_EQ(programs[r].forward, ring[r].forward);
      EXPECT_EQ(programs[r].backward, ring[r].backward);
    }
  }
}

TEST(GroupCast, OfOneGroupOrOfSingleRanksIsTheOneWithoutGroups) {
  const std::vector<Program> plain = make_programs(full(ScheduleKind::kGroupCast, 0));
  for (const int within : {1, 12}) {
    const std::vector<Program> programs = make_programs(full(ScheduleKind::kGroupCast, within));
    for (size_t r = 0; r < programs.size(); ++r) {
      EXPECT_EQ(programs[r].forward, plain[r].forward);
      EXPECT_EQ(programs[r].backward, plain[r].backward);
    }
  }
}

// Every rank of a group takes the rows of one rank of each other group, and holds them although only others need them.
TEST(GroupCast, RowsEnterAGroupAtTheOwnersPlace) {
  PlanRequest request = full(ScheduleKind::kGroupCast, 3);
  request.shape = {1, 1, 1, 48, 48, 0};  // four rows a rank
  request.ranks = 6;
  request.shape.q_len = request.shape.k_len = 24;
  // Only rank 5 sees keys of rank 0.
  request.pattern = parse_pattern("{ kind = 'slices', slices = [{ queries = [20, 1, 4], keys = [0, 1, 4] }] }", "test");
  const std::vector<Program> programs = make_programs(request);
  ASSERT_TRUE(verify(programs).holds());
  ASSERT_EQ(programs[0].forward[0].sends.size(), 1U);
  EXPECT_EQ(programs[0].forward[0].sends[0].peer, 3);
  ASSERT_EQ(programs[3].forward[1].sends.size(), 1U);
  EXPECT_EQ(programs[3].forward[1].sends[0].peer, 5);
  EXPECT_EQ(traffic(programs[3], programs[3].forward).peak_kv_rows, 2 * (4 + 4));
  // The gradient goes back the same way.
  ASSERT_EQ(programs[5].backward[3].sends.size(), 1U);
  EXPECT_EQ(programs[5].backward[3].sends[0].peer, 3);
  ASSERT_EQ(programs[3].backward[4].sends.size(), 1U);
  EXPECT_EQ(programs[3].backward[4].sends[0].peer, 0);
}

TEST(GroupCast, AddsGradientsInTheOrderOfRanks) {
  const std::vector<Program> programs = make_programs(full(ScheduleKind::kGroupCast, 4));
  for (const Program& p : programs) {
    for (const Step& step : p.backward) {
      std::map<int, std::vector<int>> order;  // by the sum: from whom its parts come
      for (const Add& a : step.adds) {
        const auto from = std::find_if(step.receives.begin(), step.receives.end(),
                                       [&](const Transfer& t) { return t.buffer == a.src; });
        ASSERT_NE(from, step.receives.end());
        order[a.dst].push_back(from->peer);
      }
      for (const auto& [sum, ranks] : order) EXPECT_TRUE(std::is_sorted(ranks.begin(), ranks.end()));
    }
  }
}

std::string refusal(const PlanRequest& request) {
  try {
    validate(request);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPlan);
    return error.what();
  }
  return "";
}

TEST(Within, IsRefusedWithWhatWouldWork) {
  const auto expect = [](ScheduleKind schedule, int within, const std::string& part) {
    const std::string text = refusal(full(schedule, within));
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(ScheduleKind::kDoubleRing, 5, "must divide the 12 ranks, got 5; use one of 1, 2, 3, 4, 6, 12, or 0");
  expect(ScheduleKind::kGroupCast, -1, "got -1; use one of 1, 2, 3, 4, 6, 12, or 0");
  expect(ScheduleKind::kRing, 4, "the schedule ring has no inner groups, got within = 4; use within = 0, or one of");
  expect(ScheduleKind::kAllGather, 12, "group-cast, double-ring");
  for (const ScheduleKind schedule : {ScheduleKind::kGroupCast, ScheduleKind::kDoubleRing, ScheduleKind::kAuto}) {
    for (const int within : {0, 1, 3, 12}) EXPECT_EQ(refusal(full(schedule, within)), "");
  }
}

TEST(Within, MakesAutoChooseAmongSchedulesWithGroups) {
  const PlanChoice choice = choose_plan(full(ScheduleKind::kAuto, 4));
  EXPECT_EQ(choice.candidates.size(), 5u);
  for (const PlanCandidate& candidate : choice.candidates) {
    EXPECT_EQ(candidate.within, 4);
    EXPECT_NE(candidate.schedule, ScheduleKind::kRing);
    EXPECT_NE(candidate.schedule, ScheduleKind::kAllGather);
  }
  validate(choice.request);
}

}  // namespace
}  // namespace annulus::groups_test
