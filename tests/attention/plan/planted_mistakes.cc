// See planted_mistakes.h.
#include "tests/attention/plan/planted_mistakes.h"

#include <algorithm>
#include <ostream>
#include <stdexcept>
#include <utility>

#include "attention/plan/schedules.h"
#include "tests/attention/plan/planted_changes.h"

namespace annulus::testing {
namespace {

std::vector<Mistake> of_one_row_and_head() {
  const PlanRequest ring = with(ring_of_four(), ScheduleKind::kRing);
  const PlanRequest all_gather = with(ring_of_four(), ScheduleKind::kAllGather);
  return {
      {"DroppedTile", ring, [](Programs& p) { p[1].forward[2].tiles.pop_back(); },
       "rank 1, forward: its tiles are not the pattern's pairs"},
      {"DoubledTile", ring, [](Programs& p) { p[2].forward[1].tiles.push_back(p[2].forward[1].tiles[0]); },
       "rank 2, forward: its tiles are not the pattern's pairs"},
      {"DroppedTileInBackward", ring, [](Programs& p) { p[1].backward[2].tiles.pop_back(); },
       "rank 1, backward: its tiles"},
      {"WiderBand", ring,
       [](Programs& p) {
         for (Tile& t : p[0].forward[0].tiles) t.band.hi += t.band.hi < 100 ? 1 : 0;
       },
       "rank 0, forward: its tiles are not the pattern's pairs"},
      {"OtherHeads", ring,
       [](Programs& p) {
         p[0].forward[0].tiles[0].heads = {0, 1, 1};
       },
       "rank 0, forward: its tiles are not the pattern's pairs"},
      {"WrongRows", ring, [](Programs& p) { p[3].forward[1].tiles[0].key_rows.begin += 1; }, "stored elsewhere"},
      {"MissingReceive", ring, [](Programs& p) { p[2].forward[2].receives.clear(); }, "has no receive"},
      {"MissingSend", all_gather, [](Programs& p) { p[2].forward[0].sends.pop_back(); }, "has no send", true},
      {"ReceiveTooLate", ring,
       [](Programs& p) {
         auto &early = p[2].forward[0].receives, &late = p[2].forward[1].receives;
         late.insert(late.begin(), early[0]);
         early.clear();
       },
       "before it is filled"},
      {"OverwrittenBuffer", all_gather,
       [](Programs& p) {
         // Two blocks share one receive buffer, so the second overwrites the first.
         auto& receives = p[0].backward[2].receives;
         receives[1].buffer = receives[0].buffer;
       },
       "two transfers arrive in buffer"},
      {"OverwrittenWhileInUse", ring,
       [](Programs& p) {
         Step& step = p[0].backward[2];
         step.receives[0].buffer = step.zero[0];
       },
       "while it travels"},
      {"ReadWhileArriving", ring,
       [](Programs& p) {
         Step &early = p[1].forward[0], &late = p[1].forward[1];
         early.tiles.insert(early.tiles.end(), late.tiles.begin(), late.tiles.end());
         late.tiles.clear();
       },
       "before it is filled"},
      {"LostGradient", ring, [](Programs& p) { p[3].backward[2].adds.clear(); }, "lost or counted twice"},
      {"GradientAddedTwice", all_gather, [](Programs& p) { p[3].backward[2].adds.push_back(p[3].backward[2].adds[0]); },
       "lost or counted twice"},
      {"GradientZeroedAgain", all_gather, [](Programs& p) { p[0].backward[1].zero.push_back(1); },
       "throws away the gradients"},
      {"Deadlock", ring,
       [](Programs& p) {
         // Ranks 0 and 1 each wait for a transfer that the other makes only in its next step.
         Program &a = p[0], &b = p[1];
         const RowSet empty = a.buffers[0].rows;
         const RowSet other = b.buffers[0].rows;
         a.buffers.push_back({BufferKind::kKV, other});
         b.buffers.push_back({BufferKind::kKV, empty});
         const int in_a = static_cast<int>(a.buffers.size()) - 1;
         const int in_b = static_cast<int>(b.buffers.size()) - 1;
         a.forward[2].receives.push_back({1, in_a, other});
         a.forward[3].sends.push_back({1, 0, empty});
         b.forward[2].receives.push_back({0, in_b, empty});
         b.forward[3].sends.push_back({0, 0, other});
       },
       "deadlock", true},
      {"TwoOwners", ring, [](Programs& p) { p[0].key_spans = p[1].key_spans; }, "another rank owns"},
  };
}

std::vector<Mistake> of_what_stands_before_the_steps() {
  const PlanRequest ring = with(ring_of_four(), ScheduleKind::kRing);
  // Buffers that nothing uses are still allocated with the rows that they declare.
  const auto unused = [](const std::function<void(RowSet&)>& spoil) {
    return [spoil](Programs& p) {
      RowSet rows = rows_of(p[1], kOwnKVBuffer);
      spoil(rows);
      add_buffer(p[1], BufferKind::kKV, rows);
    };
  };
  // The two halves of a zigzag rank's own rows are stored in reverse order, and its tiles agree with that.
  const auto swapped = [](int buffer) {
    return [buffer](Programs& p) {
      Program& r = p[1];
      std::vector<Span>& halves = r.buffers[static_cast<size_t>(buffer)].rows.blocks[0].positions;
      const int64_t half = halves[0].count;
      std::swap(halves[0], halves[1]);
      for (Step& step : r.backward) {
        for (Tile& t : step.tiles) {
          if (t.grad_buffer == buffer) t.grad_rows.begin += t.grad_rows.begin < half ? half : -half;
        }
      }
    };
  };
  return {
      {"AKeyBeyondTheEnd", ring, [](Programs& p) { p[0].key_spans.back().count += 1; }, "which does not exist"},
      {"AQueryThatNobodyOwns", ring, [](Programs& p) { p[0].query_spans.back().count -= 1; }, "no rank owns query"},
      {"AnotherLayout", with(ring_of_four(), ScheduleKind::kAllGather),
       [](Programs& p) {
         // The programs are consistent, but differ from the request by which callers cut their tensors.
         const PlanRequest request = p[0].request;
         PlanRequest other = request;
         other.layout = LayoutKind::kStriped;
         p = programs_of(other);
         for (Program& program : p) program.request = request;
       },
       "rank 1: its queries are not those that the layout gives it"},
      {"AnotherLayoutOfKeys", with(ring_of_four(), ScheduleKind::kAllGather),
       [](Programs& p) { std::swap(p[1].key_spans, p[2].key_spans); },
       "rank 1: its keys are not those that the layout gives it"},
      {"OwnRowsInAnotherOrder", no_pairs(), swapped(kOwnKVBuffer), "its first buffer is not its own"},
      {"OwnGradientsInAnotherOrder", ring, swapped(kOwnGradBuffer), "its second buffer is not its own"},
      {"AForeignBlockCalledOwn", ring,
       [](Programs& p) {
         // Tiles read rows that no transfer brings.
         Program& r = p[1];
         const int received = r.forward[1].tiles[0].buffer;
         const int claimed = add_buffer(r, BufferKind::kOwnKV, rows_of(r, received));
         for (Tile& t : r.forward[1].tiles) t.buffer = claimed;
       },
       "is named its own rows"},
      {"ForeignGradientsCalledOwn", ring,
       [](Programs& p) {
         const int sent = p[1].backward[0].zero[0];
         p[1].buffers[static_cast<size_t>(sent)].kind = BufferKind::kOwnGrad;
       },
       "is named its own rows"},
      {"ABatchRowThatDoesNotExist", ring, unused([](RowSet& r) {
         r.blocks[0].batch = {0, 1, 2};
       }),
       "names batch rows or heads that do not exist"},
      {"AHeadThatDoesNotExist", ring, unused([](RowSet& r) {
         r.blocks[0].heads = {-1, 1, 1};
       }),
       "names batch rows or heads that do not exist"},
      {"StoredKeysBeyondTheEnd", ring, unused([](RowSet& r) {
         r.blocks[0].positions = {{0, 1, 65}};
       }),
       "names keys that do not exist"},
      {"KeysStoredInAnotherOrder", ring,
       unused([](RowSet& r) { std::swap(r.blocks[0].positions[0], r.blocks[0].positions[1]); }),
       "does not store its keys in their order"},
      {"ARowStoredTwice", ring, unused([](RowSet& r) { r.blocks.push_back(r.blocks[0]); }), "stores a row twice"},
      {"KeptInABufferOfAnotherKind", ring,
       [](Programs& p) { p[1].buffers[static_cast<size_t>(p[1].saved)].kind = BufferKind::kKV; },
       "what it keeps for the backward"},
  };
}

std::vector<Mistake> of_transfers() {
  const PlanRequest ring = with(ring_of_four(), ScheduleKind::kRing);
  const PlanRequest all_gather = all_pairs(ScheduleKind::kAllGather);
  return {
      {"APeerThatDoesNotExist", ring,
       [](Programs& p) {
         const RowSet rows = rows_of(p[1], kOwnKVBuffer);
         p[1].forward[0].receives.push_back({4, add_buffer(p[1], BufferKind::kKV, rows), rows});
       },
       "names a rank or buffer that does not exist"},
      {"SentRowsThatNeverCame", several_blocks(ScheduleKind::kRing),
       [](Programs& p) {
         // In the second hop of a ring, both sides agree to transfer more than the buffer has received.
         for (size_t step = 1; step < p[0].forward.size(); ++step) {
           for (Program& from : p) {
             for (Transfer& t : from.forward[step].sends) {
               if (t.buffer == kOwnKVBuffer) continue;
               Program& to = p[static_cast<size_t>(t.peer)];
               Transfer& in = transfer_with(to.forward[step].receives, from.rank);
               if (std::any_of(in.rows.blocks.begin(), in.rows.blocks.end(),
                               [](const RowBlock& b) { return b.positions.back().last() >= 63; }))
                 continue;
               t.rows = longer(t.rows);
               in.rows = t.rows;
               to.buffers[static_cast<size_t>(in.buffer)].rows = t.rows;
               return;
             }
           }
         }
         throw std::logic_error("no block travels twice");
       },
       "moves other rows than its buffer"},
      {"RowsThatNeverArrive", all_gather,
       [](Programs& p) {
         // The buffer is larger than what is received.
         const Transfer& in = transfer_with(p[0].forward[0].receives, 1);
         p[0].buffers[static_cast<size_t>(in.buffer)].rows = longer(in.rows);
       },
       "moves other rows than its buffer"},
      {"AGradientThatStaysBehind", all_gather,
       [](Programs& p) {
         // One row fewer is sent and expected than the buffer holds.
         Transfer& out = p[1].backward[2].sends[0];
         Program& home = p[static_cast<size_t>(out.peer)];
         Transfer& in = transfer_with(home.backward[2].receives, 1);
         out.rows.blocks[0].positions.back().count -= 1;
         in.rows = out.rows;
         home.buffers[static_cast<size_t>(in.buffer)].rows = out.rows;
       },
       "moves other rows than its buffer"},
      {"TwoArriveAtOnce", all_gather,
       [](Programs& p) {
         const Transfer in = p[0].forward[0].receives[0];
         transfer(p, in.peer, kOwnKVBuffer, 0, in.buffer, 0, false, in.rows);
       },
       "two transfers arrive in buffer"},
      {"ArrivesInWhatIsFull", all_gather,
       [](Programs& p) {
         const Transfer in = p[0].forward[0].receives[0];
         transfer(p, in.peer, kOwnKVBuffer, 0, in.buffer, 1, false, in.rows);
       },
       "is overwritten by"},
      {"SentBeforeItArrives", all_gather,
       [](Programs& p) {
         const Transfer in = p[0].forward[0].receives[0];
         transfer(p, 0, in.buffer, 1, add_buffer(p[1], BufferKind::kKV, in.rows), 0, false, in.rows);
       },
       "before it is filled"},
      {"AReceiveWithoutASend", ring,
       [](Programs& p) {
         const RowSet rows = rows_of(p[1], kOwnKVBuffer);
         p[1].forward[0].receives.push_back({3, add_buffer(p[1], BufferKind::kKV, rows), rows});
       },
       "has no send", true},
      {"ASendWithoutAReceive", ring,
       [](Programs& p) {
         p[1].forward[0].sends.push_back({3, kOwnKVBuffer, rows_of(p[1], kOwnKVBuffer)});
       },
       "has no receive", true},
      {"OtherRowsAreExpected", all_gather,
       [](Programs& p) {
         // Rank 3 holds the last positions; rank 0 expects one more from rank 1.
         Transfer& in = transfer_with(p[0].forward[0].receives, 1);
         in.rows = longer(in.rows);
         p[0].buffers[static_cast<size_t>(in.buffer)].rows = in.rows;
       },
       "expects other rows than rank 1 sends", true},
      {"KeysArriveAsGradients", all_gather,
       [](Programs& p) {
         const RowSet rows = rows_of(p[2], kOwnKVBuffer);
         const int into = add_buffer(p[2], BufferKind::kGrad, rows);
         transfer(p, 2, kOwnKVBuffer, 2, into, 1, true, rows);
         p[2].backward[1].adds.push_back({kOwnGradBuffer, into});
       },
       "expects other rows than rank 2 sends", true},
      {"TwoTransfersInTheOtherOrder", all_gather,
       [](Programs& p) {
         // Of two blocks between the same ranks, the one that is listed first is received first.
         const RowSet own = rows_of(p[1], kOwnKVBuffer);
         RowSet half = own;
         half.blocks[0].positions[0].count /= 2;
         transfer(p, 1, kOwnKVBuffer, 0, add_buffer(p[0], BufferKind::kKV, half), 0, false, half);
         std::vector<Transfer>& sends = p[1].forward[0].sends;
         std::swap(transfer_with(sends, 0), sends.back());
       },
       "expects other rows than rank 1 sends", true},
  };
}

}  // namespace

PlanRequest with(PlanRequest request, ScheduleKind schedule) {
  request.schedule = schedule;
  return request;
}

PlanRequest all_pairs(ScheduleKind schedule) {
  PlanRequest request = with(ring_of_four(), schedule);
  request.pattern = {};
  request.layout = LayoutKind::kContiguous;
  return request;
}

PlanRequest no_pairs() {
  PlanRequest request = ring_of_four();
  request.pattern = {};
  request.pattern.kind = PatternSpec::Kind::kSlices;
  return request;
}

int add_buffer(Program& p, BufferKind kind, const RowSet& rows) {
  p.buffers.push_back({kind, rows});
  return static_cast<int>(p.buffers.size()) - 1;
}

RowSet rows_of(const Program& p, int buffer) { return p.buffers[static_cast<size_t>(buffer)].rows; }

Transfer& transfer_with(std::vector<Transfer>& transfers, int peer) {
  for (Transfer& t : transfers) {
    if (t.peer == peer) return t;
  }
  throw std::logic_error("the step has no such transfer");
}

void transfer(Programs& p, int from, int buffer, int to, int into, size_t step, bool backward, const RowSet& rows) {
  const auto steps = [&](int rank) -> std::vector<Step>& {
    Program& program = p[static_cast<size_t>(rank)];
    std::vector<Step>& list = backward ? program.backward : program.forward;
    if (list.size() <= step) list.resize(step + 1);
    return list;
  };
  steps(from)[step].sends.push_back({to, buffer, rows});
  steps(to)[step].receives.push_back({from, into, rows});
}

RowSet longer(RowSet rows) {
  for (RowBlock& block : rows.blocks) block.positions.push_back({block.positions.back().last() + 1, 1, 1});
  return rows;
}

std::vector<Program> programs_of(const PlanRequest& request) {
  std::vector<Program> programs;
  for (int r = 0; r < request.ranks; ++r) programs.push_back(make_program(request, r));
  return programs;
}

PlanRequest ring_of_four() {
  PlanRequest request;
  request.shape = {1, 2, 1, 64, 64, 0};
  request.pattern.causal = true;
  request.layout = LayoutKind::kZigzag;
  request.ranks = 4;
  return request;
}

PlanRequest several_blocks(ScheduleKind schedule) {
  PlanRequest request;
  request.shape = {3, 4, 2, 64, 64, 0};
  request.pattern.kind = PatternSpec::Kind::kSlices;
  const Span all = Span::range(0, 64);
  const Span first_head = Span::range(0, 2), second_head = Span::range(2, 4);
  // Batch rows 0 and 1 are alike, and row 2 differs. In row 2, the query heads of the two kv heads have different
  // tiles, but need the same rows of most ranks.
  request.pattern.slices = {{Span::range(0, 2), first_head, all, {0, 2, 32}, {}},
                            {Span::range(0, 2), second_head, all, {1, 2, 32}, {}},
                            {{2, 1, 1}, first_head, all, {0, 2, 32}, {}},
                            {{2, 1, 1}, first_head, all, {21, 2, 12}, {}},
                            {{2, 1, 1}, second_head, all, {0, 2, 32}, {-40, 40}}};
  request.schedule = schedule;
  request.layout = LayoutKind::kContiguous;
  request.ranks = 4;
  return request;
}

void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

const std::vector<Mistake>& planted_mistakes() {
  static const std::vector<Mistake> all = [] {
    std::vector<Mistake> list;
    for (const std::vector<Mistake>& group : {of_one_row_and_head(), of_what_stands_before_the_steps(), of_transfers(),
                                              of_tiles(), of_gradients(), of_queries(), of_schedules_over_groups()}) {
      list.insert(list.end(), group.begin(), group.end());
    }
    return list;
  }();
  return all;
}

}  // namespace annulus::testing
