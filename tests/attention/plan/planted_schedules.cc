// Mistakes of every kind, planted into plans of the schedules over inner groups. See planted_mistakes.h.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "attention/plan/schedules.h"
#include "tests/attention/plan/planted_changes.h"

namespace annulus::testing {
namespace {

// A place in a plan: a transfer or an addition of a rank in a step.
struct Place {
  int rank = 0;
  size_t step = 0, index = 0;
};

// Calls visit(program, place) for each of the transfers or additions `list` of the steps, until it returns true.
template <typename List, typename Visit>
void find(Programs& p, bool backward, List list, Visit visit) {
  for (Program& program : p) {
    std::vector<Step>& steps = backward ? program.backward : program.forward;
    for (size_t s = 0; s < steps.size(); ++s) {
      for (size_t i = 0; i < (steps[s].*list).size(); ++i) {
        if (visit(program, Place{program.rank, s, i})) return;
      }
    }
  }
  throw std::logic_error("the plan has no place for this mistake");
}

bool is_gradient(const Program& program, const Transfer& t) {
  return program.buffers[static_cast<size_t>(t.buffer)].holds_sums();
}

template <typename T>
T take(std::vector<T>& list, size_t index) {
  const T item = list[index];
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(index));
  return item;
}

void drop_a_tile(Programs& p) {
  for (Step& step : p[1].backward) {
    if (step.tiles.empty() || step.tiles.back().buffer == kOwnKVBuffer) continue;
    step.tiles.pop_back();
    return;
  }
  throw std::logic_error("rank 1 computes with its own keys only");
}

void double_a_tile(Programs& p) {
  std::vector<Tile>& tiles = p[2].forward[1].tiles;
  tiles.push_back(tiles.at(0));
}

// Takes out the last block that some rank sends to another one and returns it with its sender.
std::pair<Program*, Transfer> take_last_keys(Programs& p) {
  std::pair<Program*, Transfer> taken;
  find(p, false, &Step::sends, [&](Program& program, const Place& at) {
    const int peer = program.forward[at.step].sends[at.index].peer;
    for (size_t s = at.step; s < program.forward.size(); ++s) {
      for (size_t i = s == at.step ? at.index + 1 : 0; i < program.forward[s].sends.size(); ++i) {
        if (program.forward[s].sends[i].peer == peer) return false;
      }
    }
    taken = {&program, take(program.forward[at.step].sends, at.index)};
    return true;
  });
  return taken;
}

void send_no_keys(Programs& p) { take_last_keys(p); }

void send_keys_too_late(Programs& p) {
  const auto [program, late] = take_last_keys(p);
  program->forward.emplace_back().sends.push_back(late);
}

void receive_no_keys(Programs& p) {
  find(p, false, &Step::receives, [&](Program& program, const Place& at) {
    take(program.forward[at.step].receives, at.index);
    return true;
  });
}

// A block arrives a second time, where the first one still lies.
void receive_keys_again(Programs& p) {
  find(p, false, &Step::sends, [&](Program& program, const Place& at) {
    const Transfer t = program.forward[at.step].sends[at.index];
    const int into = transfer_with(p[static_cast<size_t>(t.peer)].forward[at.step].receives, program.rank).buffer;
    transfer(p, program.rank, t.buffer, t.peer, into, at.step + 1, false, t.rows);
    return true;
  });
}

void lose_a_gradient(Programs& p) {
  find(p, true, &Step::adds, [](Program& program, const Place& at) {
    take(program.backward[at.step].adds, at.index);
    return true;
  });
}

void add_a_gradient_twice(Programs& p) {
  find(p, true, &Step::adds, [](Program& program, const Place& at) {
    std::vector<Add>& adds = program.backward[at.step].adds;
    adds.push_back(Add(adds[at.index]));
    return true;
  });
}

void zero_a_sum_again(Programs& p) {
  find(p, true, &Step::adds, [](Program& program, const Place& at) {
    const int sum = program.backward[at.step].adds[at.index].dst;
    if (sum == kOwnGradBuffer) return false;
    program.backward[at.step].zero.push_back(sum);
    return true;
  });
}

void send_a_gradient_twice(Programs& p) {
  find(p, true, &Step::sends, [&](Program& program, const Place& at) {
    const Transfer t = program.backward[at.step].sends[at.index];
    if (!is_gradient(program, t)) return false;
    Program& home = p[static_cast<size_t>(t.peer)];
    const int again = add_buffer(home, BufferKind::kGrad, t.rows);
    transfer(p, program.rank, t.buffer, t.peer, again, program.backward.size() - 1, true, t.rows);
    home.backward.back().adds.push_back({kOwnGradBuffer, again});
    return true;
  });
}

// A sum is sent in the step that still adds to it.
void send_a_sum_too_early(Programs& p) {
  find(p, true, &Step::adds, [](Program& program, const Place& at) {
    const int sum = program.backward[at.step].adds[at.index].dst;
    for (size_t s = at.step + 1; s < program.backward.size(); ++s) {
      std::vector<Transfer>& sends = program.backward[s].sends;
      for (size_t i = 0; i < sends.size(); ++i) {
        if (sends[i].buffer != sum) continue;
        const Transfer early = take(sends, i);
        program.backward[at.step].sends.push_back(early);
        return true;
      }
    }
    return false;
  });
}

void send_a_gradient_elsewhere(Programs& p) {
  find(p, true, &Step::sends, [](Program& program, const Place& at) {
    Transfer& t = program.backward[at.step].sends[at.index];
    if (!is_gradient(program, t)) return false;
    t.peer = program.rank;
    return true;
  });
}

// All kinds of mistakes in the plan of a request. `too_early` is what the verifier says of a sum that leaves too early.
void append_kinds(const std::string& name, const PlanRequest& request, const std::string& too_early,
                  std::vector<Mistake>& list) {
  const std::vector<Mistake> kinds = {
      {"DroppedTile", request, drop_a_tile, "rank 1, backward: its tiles are not the pattern's pairs"},
      {"DoubledTile", request, double_a_tile, "rank 2, forward: its tiles are not the pattern's pairs"},
      {"KeysNotSent", request, send_no_keys, "has no send", true},
      {"KeysNotReceived", request, receive_no_keys, "has no receive"},
      {"KeysSentTooLate", request, send_keys_too_late, "steps of the same number", true},
      {"KeysReceivedAgain", request, receive_keys_again, "is overwritten by"},
      {"LostGradient", request, lose_a_gradient, "lost or counted twice"},
      {"GradientAddedTwice", request, add_a_gradient_twice, "lost or counted twice"},
      {"SumZeroedAgain", request, zero_a_sum_again, "throws away the gradients"},
      {"GradientSentTwice", request, send_a_gradient_twice, "lost or counted twice"},
      {"SumSentTooEarly", request, send_a_sum_too_early, too_early},
      {"GradientSentElsewhere", request, send_a_gradient_elsewhere, "has no receive", true},
  };
  for (Mistake mistake : kinds) {
    mistake.name = name + mistake.name;
    list.push_back(std::move(mistake));
  }
}

PlanRequest two_groups_of_three(ScheduleKind schedule) {
  PlanRequest request = all_pairs(schedule);
  request.ranks = 6;
  request.within = 3;
  return request;
}

// Three groups of two ranks: the rows of two owners enter a group at each of its ranks.
PlanRequest three_groups_of_two() {
  PlanRequest request = two_groups_of_three(ScheduleKind::kGroupCast);
  request.within = 2;
  return request;
}

}  // namespace

std::vector<Mistake> of_schedules_over_groups() {
  std::vector<Mistake> list;
  PlanRequest double_ring = two_groups_of_three(ScheduleKind::kDoubleRing);
  append_kinds("DoubleRing", double_ring, "before it is filled", list);
  double_ring.keep_last = false;
  append_kinds("DoubleRingThatKeepsNothing", double_ring, "before it is filled", list);
  const PlanRequest group_cast = two_groups_of_three(ScheduleKind::kGroupCast);
  append_kinds("GroupCastOverGroups", group_cast, "while it travels, or after it left", list);

  const std::vector<Mistake> of_groups = {
      {"TheNextGroupsBlockInTheVisitorsBuffer", double_ring,
       [](Programs& p) {
         // Step 0 brings the block of the next turn from rank 3 and the next block of this one from rank 2.
         std::vector<Transfer>& receives = p[0].forward[0].receives;
         transfer_with(receives, 3).buffer = transfer_with(receives, 2).buffer;
       },
       "moves other rows than its buffer"},
      {"TheNextGroupsBlockComesAStepLate", double_ring,
       [](Programs& p) {
         // It is used only in step 3, so the rank alone notices nothing.
         std::vector<Transfer>& receives = p[0].forward[0].receives;
         const Transfer late = transfer_with(receives, 3);
         std::erase_if(receives, [](const Transfer& t) { return t.peer == 3; });
         p[0].forward[1].receives.push_back(late);
       },
       "steps of the same number", true},
      {"PassedOnBeforeItEntered", group_cast,
       [](Programs& p) {
         // Rank 0 passes on the rows of rank 3 while they enter its group.
         Step& step = p[0].forward[1];
         p[0].forward[0].sends.push_back(take(step.sends, 0));
       },
       "before it is filled"},
      {"TwoOwnersRowsExchanged", three_groups_of_two(),
       [](Programs& p) {
         // Rank 0 passes on to rank 1 the rows of two owners, in the other order than rank 1 expects them.
         std::vector<Transfer>& sends = p[0].forward[1].sends;
         std::swap(sends[0], sends[1]);
       },
       "expects other rows than rank 0 sends", true},
      {"AddedToTheSumOfAnotherOwner", three_groups_of_two(),
       [](Programs& p) {
         std::vector<Add>& adds = p[0].backward[3].adds;
         adds.front().dst = adds.back().dst;
       },
       "adds gradients of other rows"},
  };
  list.insert(list.end(), of_groups.begin(), of_groups.end());
  return list;
}

}  // namespace annulus::testing
