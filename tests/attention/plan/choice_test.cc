// Tests of the choice by predicted time: which schedule `auto` takes on which machine, that all ranks come to the same,
// what it says, and what it refuses.
#include "attention/plan/choice.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attention/testing/any_request.h"
#include "comm/hosts.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/caches.h"

namespace annulus::choice_test {
namespace {

PlanRequest request_of(const char* pattern, int64_t length, int ranks, LayoutKind layout = LayoutKind::kZigzag) {
  PlanRequest request;
  request.shape = {1, 8, 2, length, length, 0};
  request.pattern = parse_pattern(pattern, "test");
  request.layout = layout;
  request.ranks = ranks;
  return request;
}

MachineProfile with_links(double bandwidth, double latency) {
  MachineProfile machine = built_in_machine("h100");
  machine.inside.bandwidth = machine.between.bandwidth = bandwidth;
  machine.inside.latency = machine.between.latency = latency;
  return machine;
}

// A candidate's time is that of its plan: the same sweep over the programs that make_programs returns.
TEST(Choice, PredictsTheTimeOfThePlanThatRuns) {
  for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast}) {
    PlanRequest request = request_of("{ kind = \"causal\" }", 4096, 4);
    request.schedule = schedule;
    const PlanChoice choice = choose_plan(request);
    ASSERT_EQ(choice.candidates.size(), 1u);
    EXPECT_EQ(choice.request.schedule, schedule);
    std::vector<RankSteps> steps;
    for (const Program& program : make_programs(request)) {
      steps.push_back({program.rank, step_costs(program, false, request.terms->machine, {128, 2})});
    }
    EXPECT_EQ(choice.chosen().forward.seconds, slowest(sweep(steps, 4, request.terms->machine)).seconds);
    EXPECT_GT(choice.chosen().backward.seconds, 0);
  }
}

TEST(Choice, TakesTheLeastTimeOnEachMachine) {
  const auto chosen = [](PlanRequest request, const MachineProfile& machine) {
    request.terms = PlanTerms{.machine = machine, .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
    const PlanChoice choice = choose_plan(request);
    EXPECT_EQ(resolve_schedule(request), choice.request);
    for (const PlanCandidate& c : choice.candidates) {
      EXPECT_TRUE(!c.refused.empty() || c.seconds() * 1.02 >= choice.chosen().seconds()) << c.name();
    }
    return choice.chosen().schedule;
  };
  // A narrow link: what is not needed must not be sent. A window needs the rows of one neighbour.
  const PlanRequest window =
      request_of("{ kind = \"window\", left = 255, right = 0 }", 65536, 8, LayoutKind::kContiguous);
  EXPECT_NE(chosen(window, with_links(1e9, 1e-6)), ScheduleKind::kAllGather);
  // A ring hides its transfers behind computation, where all rows are needed.
  const PlanRequest full = request_of("{ kind = \"full\" }", 262144, 8);
  EXPECT_EQ(chosen(full, with_links(100e9, 1e-6)), ScheduleKind::kRing);
  // Where latency is all, few steps are best.
  const PlanRequest small = request_of("{ kind = \"full\" }", 512, 8);
  EXPECT_NE(chosen(small, with_links(400e9, 1e-3)), ScheduleKind::kRing);
}

// Over fast links all schedules take as long, and a ring holds two blocks of keys beside its own.
TEST(Choice, TakesTheFewestBytesAmongThoseThatTakeAsLong) {
  PlanRequest request = request_of("{ kind = \"full\" }", 262144, 8);
  request.terms =
      PlanTerms{.machine = with_links(1e15, 0), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  const PlanChoice choice = choose_plan(request);
  EXPECT_EQ(choice.chosen().schedule, ScheduleKind::kRing);
  EXPECT_NE(choice.reason().find("all-gather takes as long and holds "), std::string::npos) << choice.reason();
}

TEST(Choice, SaysWhyTheOthersLost) {
  PlanRequest request = request_of("{ kind = \"causal\" }", 65536, 6);
  request.terms = PlanTerms{
      .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  const PlanChoice choice = choose_plan(request);
  const std::string reason = choice.reason();
  EXPECT_EQ(reason.find('\n'), std::string::npos);
  EXPECT_EQ(reason.rfind(choice.chosen().name() + ", ", 0), 0u) << reason;
  EXPECT_NE(reason.find(" predicted on h100 (compute "), std::string::npos) << reason;
  for (const PlanCandidate& c : choice.candidates) {
    EXPECT_NE(reason.find(c.name()), std::string::npos) << reason;
    EXPECT_NE(reason.find(c.refused), std::string::npos) << reason;
  }
  EXPECT_EQ(choice.lines().size(), choice.candidates.size());
  const auto ulysses = std::find_if(choice.candidates.begin(), choice.candidates.end(), [](const PlanCandidate& c) {
    return c.schedule == ScheduleKind::kUlysses && c.within == 0;
  });
  ASSERT_NE(ulysses, choice.candidates.end());
  EXPECT_FALSE(ulysses->refused.empty()) << "8 heads cannot be divided among 6 ranks";
}

// A schedule that moves queries is taken where a rank has the bits of masks that it needs, or is yet to read them.
TEST(Choice, MindsWhichBitsOfMasksARankHasOrMayRead) {
  const int64_t n = 512;
  PlanRequest request = request_of("{ kind = \"full\" }", n, 4);
  std::vector<uint8_t> shown(static_cast<size_t>(n * n));
  for (size_t i = 0; i < shown.size(); ++i) shown[i] = i % 3 > 0;
  const MaskRows rows = [&](int64_t, int64_t first, int64_t) { return shown.data() + first * n; };
  const auto why_not_ulysses = [&](const HeldBits& held) {
    request.pattern.mask =
        given_mask(std::make_shared<const TokenMask>(make_token_mask(1, 1, n, n, rows, held, "the mask")));
    const PlanChoice choice = choose_plan(request, make_pattern(request.pattern, request.shape));
    for (const PlanCandidate& c : choice.candidates) {
      if (c.schedule == ScheduleKind::kUlysses && c.within == 0) return c.refused;
    }
    return std::string("is none of the candidates");
  };
  EXPECT_EQ(why_not_ulysses(HeldBits::everything()), "");
  EXPECT_EQ(why_not_ulysses(HeldBits()), "");
  EXPECT_EQ(why_not_ulysses(needed_bits(request, 1)), "each rank holds the bits of its own queries' mask alone");
  const int64_t limit = mask_limit(), all = 8 * n + n * n / 8;
  set_mask_limit(all - 1);
  const std::string refused = why_not_ulysses(HeldBits());
  set_mask_limit(limit);
  EXPECT_NE(refused.find("on rank 0, more than memory.masks"), std::string::npos) << refused;
}

TEST(Choice, OffersInnerGroupsOverSeveralHosts) {
  PlanRequest request = request_of("{ kind = \"causal\" }", 65536, 16);
  request.terms = PlanTerms{
      .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  const auto has = [&](ScheduleKind schedule, int within) {
    const PlanChoice choice = choose_plan(request);
    return std::any_of(choice.candidates.begin(), choice.candidates.end(),
                       [&](const PlanCandidate& c) { return c.schedule == schedule && c.within == within; });
  };
  EXPECT_TRUE(has(ScheduleKind::kGroupCast, 0));
  EXPECT_TRUE(has(ScheduleKind::kGroupCast, 8));
  EXPECT_TRUE(has(ScheduleKind::kDoubleRing, 8));
  EXPECT_TRUE(has(ScheduleKind::kUlyssesRing, 4));
  EXPECT_FALSE(has(ScheduleKind::kUlyssesRing, 16));
  request.within = 4;  // the caller's
  EXPECT_TRUE(has(ScheduleKind::kGroupCast, 4));
  EXPECT_FALSE(has(ScheduleKind::kGroupCast, 8));
}

// The hosts of a job are those it runs on, whatever its machine's profile says.
TEST(Choice, FollowsTheHostsOfAJob) {
  const TermsPointer terms = PlanTerms{
      .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  ASSERT_EQ(terms->machine.ranks_per_host, 8);
  const auto hosts = [&](const std::vector<int>& of) { return on_hosts(terms, RankHosts(of))->machine.on_a_host(4); };
  EXPECT_EQ(hosts({0, 0, 1, 1}), 2);
  EXPECT_EQ(hosts({0, 1, 2, 3}), 1);
  EXPECT_EQ(hosts({0, 0, 0, 0}), 4);
  // More ranks of one host than the profile has.
  EXPECT_EQ(on_hosts(terms, RankHosts(16))->machine.on_a_host(16), 16);
  EXPECT_EQ(on_hosts(terms, RankHosts({0, 0, 0, 1, 1}))->machine.on_a_host(5), 3) << "the last host may have fewer";
  // What cannot be said by one number, and what the machine says already, changes nothing.
  EXPECT_EQ(on_hosts(terms, RankHosts({0, 1, 1, 1})), terms);
  EXPECT_EQ(on_hosts(terms, RankHosts({0, 1, 0, 1})), terms);
  EXPECT_EQ(on_hosts(terms, RankHosts(4)), terms);
  PlanRequest request = request_of("{ kind = \"causal\" }", 65536, 4);
  request.terms = on_hosts(terms, RankHosts({0, 0, 1, 1}));
  const PlanChoice choice = choose_plan(request);
  EXPECT_TRUE(std::any_of(choice.candidates.begin(), choice.candidates.end(), [](const PlanCandidate& c) {
    return c.schedule == ScheduleKind::kGroupCast && c.within == 2;
  }));
}

TEST(Choice, ChoosesTheLayoutWhereItMay) {
  PlanRequest request = request_of("{ kind = \"causal\" }", 262144, 8);
  request.terms = PlanTerms{
      .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  const PlanChoice choice = choose_plan(request, {LayoutKind::kContiguous, LayoutKind::kZigzag});
  EXPECT_EQ(choice.request.layout, LayoutKind::kZigzag) << choice.reason();  // half of the work is idle otherwise
  request.layout = LayoutKind::kContiguous;
  EXPECT_EQ(choose_plan(request).request.layout, LayoutKind::kContiguous) << "a layout that is given stays";
  request.even = true;  // zigzag needs a multiple of 16
  request.shape.q_len = request.shape.k_len = 1032;
  const PlanChoice even = choose_plan(request, {LayoutKind::kZigzag, LayoutKind::kContiguous});
  EXPECT_EQ(even.request.layout, LayoutKind::kContiguous);
}

// Calls that share a layout are weighed together, and the reason has all layouts.
TEST(Choice, CallsThatShareALayoutHaveTheOneOfTheirSum) {
  PlanRequest request = request_of("{ kind = \"causal\" }", 262144, 8);
  request.terms = PlanTerms{
      .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  const LayoutChoice one = choose_layout(request);
  EXPECT_EQ(one.layout, LayoutKind::kZigzag);
  EXPECT_EQ(one.reason.rfind("zigzag, ", 0), 0u) << one.reason;
  for (const char* const other : {"; contiguous ", "; striped ", "; balanced ", " predicted on h100"}) {
    EXPECT_NE(one.reason.find(other), std::string::npos) << one.reason;
  }
  // A window that contiguous parts suit, made so often that it decides.
  PlanRequest window = request;
  window.pattern = parse_pattern("{ kind = \"window\", left = 63, right = 0 }", "test");
  const auto together = [&](int64_t windows) {
    return choose_layout(
        [&](LayoutKind layout) {
          request.layout = window.layout = layout;
          return std::vector<RepeatedCall>{{request, 1}, {window, windows}};
        },
        "all layers");
  };
  EXPECT_EQ(together(0).layout, LayoutKind::kZigzag);
  const LayoutChoice many = together(1'000'000);
  EXPECT_EQ(many.layout, choose_layout(window).layout);
  EXPECT_NE(many.reason.find(" predicted for all layers on h100"), std::string::npos) << many.reason;
  request.even = true;  // zigzag and balanced need multiples, so only one is left
  request.shape.q_len = request.shape.k_len = 1032;
  const LayoutChoice even = choose_layout(request);
  EXPECT_NE(even.layout, LayoutKind::kZigzag);
  EXPECT_NE(even.reason.find("; zigzag: a sequence of length 1032 cannot be divided evenly"), std::string::npos)
      << even.reason;
  request.shape.q_len = request.shape.k_len = 1031;
  EXPECT_THROW(choose_layout(request), Error);
  request.ranks = 1;
  EXPECT_EQ(choose_layout(request).reason, "zigzag: one rank, nothing is sent");
}

// What is refused yields to the next in time, and says why; at last nothing is left to refuse.
TEST(Choice, CallsYieldWhatTheirCallerRefuses) {
  PlanRequest request = request_of("{ kind = \"causal\" }", 65536, 8);
  request.terms = PlanTerms{.machine = built_in_machine("h100")};
  PlanRequest window = request;
  window.pattern = parse_pattern("{ kind = \"window\", left = 63, right = 0 }", "test");
  const auto placed = [&](LayoutKind layout) {
    request.layout = window.layout = layout;
    return std::vector<RepeatedCall>{{request, 2}, {window, 3}};
  };
  CallsChoice choice(placed, {LayoutKind::kZigzag, LayoutKind::kContiguous}, "all layers");
  const auto seconds = [](const CallsChoice::InLayout& of) {
    return 2 * of.plans[0].chosen().seconds() + 3 * of.plans[1].chosen().seconds();
  };
  double before = 0;
  int refused = 0;
  for (bool other = true; other; ++refused) {
    const CallsChoice::InLayout best = choice.best();
    EXPECT_EQ(best.seconds, seconds(best));
    EXPECT_GE(best.seconds * 1.04, before) << "alike times are ordered by bytes";
    before = best.seconds;
    const double most = std::max(best.plans[0].chosen().bytes, best.plans[1].chosen().bytes);
    other = choice.refuse("reason " + std::to_string(refused));
    if (!other || choice.best().layout != best.layout) continue;
    const auto has = [&](const PlanChoice& plan) {
      return plan.reason().find("reason " + std::to_string(refused)) != std::string::npos;
    };
    for (size_t i = 0; i < 2; ++i) {
      if (has(choice.best().plans[i]) && best.plans[1 - i].candidates[1].refused.empty()) {
        EXPECT_EQ(best.plans[i].chosen().bytes, most);
      }
    }
    EXPECT_NE(has(choice.best().plans[0]), has(choice.best().plans[1]));
  }
  EXPECT_GT(refused, 8);
  EXPECT_NE(choice.reason().find(": reason "), std::string::npos) << choice.reason();
}

// Of a ring each layer keeps the keys and values that it held last; of a group-cast none does.
TEST(Choice, BytesCountWhatOtherLayersKeep) {
  PlanRequest request = request_of("{ kind = \"full\" }", 65536, 8);
  const auto ring = [&](int64_t layers) {
    request.schedule = ScheduleKind::kRing;
    request.terms = PlanTerms{.machine = built_in_machine("h100"), .layers = layers};
    return choose_plan(request).chosen().bytes;
  };
  const double kept = 2.0 * 2 * (65536 / 8) * 128 * 2;  // K and V of two heads
  EXPECT_EQ(ring(5) - ring(1), 4 * kept);
  PlanTerms terms{.machine = built_in_machine("h100"), .memory = kLeanest, .layers = 1};
  request.schedule = ScheduleKind::kAuto;
  request.terms = terms;
  EXPECT_EQ(choose_plan(request).chosen().schedule, ScheduleKind::kRing);
  terms.layers = 64;
  request.terms = terms;
  EXPECT_NE(choose_plan(request).chosen().schedule, ScheduleKind::kRing);
}

TEST(Choice, RefusesWhatDoesNotFitTheMemory) {
  PlanRequest request = request_of("{ kind = \"full\" }", 65536, 8);
  const auto bounded = [&](double memory) {
    request.terms = PlanTerms{
        .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = memory};
  };
  bounded(1e12);
  const PlanChoice all = choose_plan(request);
  const auto held = [&](ScheduleKind schedule) {
    return std::find_if(all.candidates.begin(), all.candidates.end(),
                        [&](const PlanCandidate& c) { return c.schedule == schedule; })
        ->bytes;
  };
  ASSERT_LT(held(ScheduleKind::kRing), held(ScheduleKind::kAllGather));
  bounded(held(ScheduleKind::kRing));
  const PlanChoice some = choose_plan(request);
  EXPECT_EQ(some.chosen().schedule, ScheduleKind::kRing);
  const double over = held(ScheduleKind::kAllGather) - held(ScheduleKind::kRing);
  EXPECT_NE(some.reason().find("all-gather: a rank would hold " + bytes_text(held(ScheduleKind::kAllGather)) + ", " +
                               bytes_text(over) + " more than the " + bytes_text(held(ScheduleKind::kRing)) +
                               " that are free"),
            std::string::npos)
      << some.reason();
  const auto refused = [&](const std::string& expected) {
    try {
      choose_plan(request);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPlan);
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  };
  bounded(2e6);
  refused("no schedule fits the memory that is free: with ");
  refused(", and 2.0 MB are free; use about ");
  PlanRequest lenient = request;
  const auto resolved = [&](TermsPointer terms) {
    lenient.terms = std::move(terms);
    return resolve_schedule(lenient).schedule;
  };
  PlanTerms leanest = *request.terms;
  leanest.memory = kLeanest;
  bounded(0);
  EXPECT_EQ(resolved(within_memory(request.terms, 2e6, /*or_leanest=*/true)), resolved(leanest));
  EXPECT_EQ(resolved(within_memory(request.terms, 1e12, /*or_leanest=*/true)), resolved(request.terms))
      << "something fits";
  bounded(2e6);
  request.schedule = ScheduleKind::kRing;
  refused("ring does not fit the memory that is free: with ring a rank holds ");
  bounded(0);
  MachineProfile small = built_in_machine("h100");
  small.memory = 2e6;
  request.schedule = ScheduleKind::kAuto;
  request.terms = PlanTerms{.machine = small, .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  refused("no schedule fits the memory of h100: with ");
  refused(", and it has 2.0 MB; use about ");
}

// What is free, and how many layers keep something, changes what is chosen, not what candidates take.
TEST(Choice, CandidatesArePricedOnceForAllBounds) {
  const auto made = [] {
    for (const CacheReport& cache : cache_reports()) {
      if (cache.name == "choices") return cache.stats.misses;
    }
    return int64_t{-1};
  };
  PlanRequest request = request_of("{ kind = \"full\" }", 65536, 8);
  PlanTerms terms{.machine = with_links(1e11, 3e-6)};  // of this test alone
  const int64_t before = made();
  for (const double memory : {0.0, kLeanest, 1e12, 1e10}) {
    for (const int64_t layers : {1, 3}) {
      terms.memory = memory, terms.layers = layers, terms.or_leanest = true;
      request.terms = TermsPointer(terms);
      choose_plan(request);
    }
  }
  EXPECT_EQ(made(), before + 1);
}

// What is free bounds a choice where the machine has more; the leanest is taken without a bound.
TEST(Choice, TheLesserOfFreeAndTheMachinesMemoryBounds) {
  PlanTerms terms{
      .machine = built_in_machine("h100"), .head_dim = 128, .element_bytes = 2, .backward = true, .memory = 0};
  terms.machine.memory = 80e9;
  EXPECT_EQ(within_memory(terms, 10e9)->most_bytes(), 10e9);
  EXPECT_EQ(within_memory(terms, 90e9), TermsPointer(terms));
  terms.machine.memory = 0;
  EXPECT_EQ(within_memory(terms, 90e9)->most_bytes(), 90e9);
  terms.memory = kLeanest;
  EXPECT_EQ(within_memory(terms, 10e9), TermsPointer(terms));
}

TEST(Choice, TermsArePartOfWhatRanksCompare) {
  PlanRequest a = request_of("{ kind = \"causal\" }", 4096, 4), b = a;
  EXPECT_EQ(a.terms->machine.name, "cpu");
  const auto terms = [](const char* name, int64_t head_dim) {
    return PlanTerms{
        .machine = built_in_machine(name), .head_dim = head_dim, .element_bytes = 2, .backward = true, .memory = 0};
  };
  a.terms = terms("h100", 128), b.terms = terms("h100", 128);
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.text(), b.text());
  b.terms = terms("h200", 128);
  EXPECT_NE(a, b);
  EXPECT_NE(a.text(), b.text());
  b.terms = terms("h100", 64);
  EXPECT_NE(a.text(), b.text());
  a.schedule = b.schedule = ScheduleKind::kRing;
  EXPECT_EQ(a.text(), b.text()) << "they change only what auto stands for";
}

RC_GTEST_PROP(Choice, IsTheSameEachTimeAndMakesItsPlan, ()) {
  PlanRequest request = testing::any_request();
  request.schedule = ScheduleKind::kAuto;
  MachineProfile machine = built_in_machine(*rc::gen::element<std::string>("h100", "cpu"));
  machine.ranks_per_host = *rc::gen::inRange(0, 5);
  request.terms = PlanTerms{
      .machine = machine, .head_dim = 16, .element_bytes = 4, .backward = *rc::gen::arbitrary<bool>(), .memory = 0};
  const PlanChoice choice = choose_plan(request), again = choose_plan(request);
  RC_ASSERT(choice.request == again.request);
  RC_ASSERT(choice.reason() == again.reason());
  RC_ASSERT(choice.request.schedule != ScheduleKind::kAuto);
  for (int r = 0; r < request.ranks; ++r) RC_ASSERT(make_program(request, r) == make_program(choice.request, r));
}

}  // namespace
}  // namespace annulus::choice_test
