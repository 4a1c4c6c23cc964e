// Planted mistakes (planted_mistakes.h) in plans whose queries travel to keys.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan/schedules.h"
#include "tests/attention/plan/planted_changes.h"

namespace annulus::testing {
namespace {

// The first tile of a step with queries of another rank.
Tile& foreign_tile(Step& step) {
  return *std::find_if(step.tiles.begin(), step.tiles.end(), [](const Tile& t) { return t.queries >= 0; });
}

std::vector<Step>& steps_of(Program& p, bool backward) { return backward ? p.backward : p.forward; }

// Leaves out the transfers of results between ranks 0 and 1, and what is done with them.
void keep_results(Programs& p, bool backward) {
  for (const int rank : {0, 1}) {
    Program& program = p[static_cast<size_t>(rank)];
    Step& last = steps_of(program, backward).back();
    const auto result = [&](const Transfer& t) {
      return t.peer == 1 - rank && !program.buffers[static_cast<size_t>(t.buffer)].of_keys();
    };
    for (const Transfer& t : last.receives) {
      if (result(t)) std::erase_if(last.adds, [&](const Add& add) { return add.src == t.buffer; });
    }
    std::erase_if(last.sends, result);
    std::erase_if(last.receives, result);
  }
}

Mistake in(const PlanRequest& request, std::string name, std::function<void(Programs&)> plant, std::string finding,
           bool between_two = false) {
  return {std::move(name), request, std::move(plant), std::move(finding), between_two};
}

}  // namespace

std::vector<Mistake> of_queries() {
  // Rank 0 computes the queries of ranks 0 and 1 with the keys of ranks 0 and 2. Steps: exchange, compute, go home.
  PlanRequest mesh = all_pairs(ScheduleKind::kMesh);
  mesh.within = 2;
  PlanRequest ulysses = mesh, ring = mesh;
  ulysses.schedule = ScheduleKind::kUlysses;
  ring.schedule = ScheduleKind::kUlyssesRing;
  std::vector<Mistake> list;
  for (const auto& [name, request, step] :
       {std::tuple("Mesh", mesh, size_t{1}), std::tuple("Ulysses", ulysses, size_t{1}),
        std::tuple("UlyssesRing", ring, size_t{2})}) {
    const size_t s = step;
    for (const bool backward : {false, true}) {
      const auto steps = [backward](Program& p) -> std::vector<Step>& { return steps_of(p, backward); };
      const std::string of = std::string(backward ? "InTheBackward" : "") + name;
      const auto add = [&](const std::string& what, std::function<void(Programs&)> plant, const std::string& finding,
                           bool between_two = false) {
        list.push_back(in(request, what + of, std::move(plant), finding, between_two));
      };
      add(
          "ATileThatNobodyComputes", [=](Programs& p) { steps(p[1])[s].tiles.pop_back(); },
          "the tiles of all ranks are not the pattern's pairs", true);
      add(
          "ATileComputedTwice",
          [=](Programs& p) {
            std::vector<Tile>& tiles = steps(p[2])[s].tiles;
            tiles.push_back(tiles[0]);
          },
          "the tiles of all ranks are not the pattern's pairs", true);
      add(
          "ATileOfOtherHeads",
          [=](Programs& p) {
            Tile& tile = foreign_tile(steps(p[0])[s]);
            tile.heads.begin = 2;
          },
          "which its queries do not have");
      add(
          "QueriesInOtherRows", [=](Programs& p) { foreign_tile(steps(p[0])[s]).query_rows.begin += 1; },
          "which are stored elsewhere");
      add(
          "QueriesFromABufferOfKeys", [=](Programs& p) { foreign_tile(steps(p[0])[s]).queries = kOwnKVBuffer; },
          "reads queries from a buffer that holds none");
      add(
          "QueriesReadBeforeTheyArrive",
          [=](Programs& p) {
            std::vector<Step>& all = steps(p[0]);
            Tile tile = foreign_tile(all[s]);
            tile.buffer = kOwnKVBuffer, tile.block = 0, tile.grad_buffer = backward ? kOwnGradBuffer : -1;
            tile.key_rows = Span::range(0, 16), tile.key_positions = Span::range(0, 16);
            tile.grad_rows = backward ? tile.key_rows : Span{};
            all[0].tiles.push_back(tile);
          },
          "before they arrive");
      add(
          "QueriesNeverEnded",
          [=](Programs& p) {
            keep_results(p, backward);
            for (Step& all : steps(p[0])) all.finishes.clear();
          },
          "is lost: they are not ended");
      add(
          "QueriesEndedTwice",
          [=](Programs& p) {
            for (Step& all : steps(p[0])) {
              if (all.finishes.empty()) continue;
              const RowSet rows = rows_of(p[0], all.finishes[0].queries);
              all.finishes.push_back({all.finishes[0].queries, add_buffer(p[0], BufferKind::kResults, rows)});
              return;
            }
          },
          "twice");
      add(
          "ATileAfterTheEnd",
          [=](Programs& p) {
            std::vector<Step>& all = steps(p[0]);
            const size_t first = static_cast<size_t>(
                std::find_if(all.begin(), all.end(), [](const Step& x) { return !x.finishes.empty(); }) - all.begin());
            const Tile tile = foreign_tile(all[s]);
            all[first + 1].tiles.push_back(tile);
          },
          "which have ended");
      add(
          "ResultsOfOtherQueries",
          [=](Programs& p) {
            for (Step& all : steps(p[0])) {
              for (const Finish& f : all.finishes)
                p[0].buffers[static_cast<size_t>(f.results)].rows.blocks[0].heads.count = 1;
              for (const Finish& f : all.finishes)
                p[0].buffers[static_cast<size_t>(f.results)].rows.blocks[0].positions[0].count -= 1;
            }
          },
          "are of other rows than their queries");
      add(
          "ResultsThatNobodyMerges", [=](Programs& p) { steps(p[0]).back().adds.pop_back(); }, "are lost");
      add(
          "ResultsMergedTwice",
          [=](Programs& p) {
            std::vector<Add>& adds = steps(p[0]).back().adds;
            adds.push_back(adds.back());
          },
          "lost or counted twice");
      add(
          "ResultsAddedToGradients", [=](Programs& p) { steps(p[0]).back().adds.back().dst = kOwnGradBuffer; },
          "or one to the other");
      add(
          "OwnTilesAfterTheMerge",
          [=](Programs& p) {
            std::vector<Step>& all = steps(p[0]);
            const Tile own =
                *std::find_if(all[0].tiles.begin(), all[0].tiles.end(), [](const Tile& t) { return t.queries < 0; });
            Step late;
            late.tiles = {own};
            all.push_back(late);
          },
          "which have ended");
      add(
          "ResultsThatStay", [=](Programs& p) { keep_results(p, backward); }, "lost or counted twice");
    }
  }
  list.push_back(in(
      mesh, "QueriesOfHeadsOfTwoKvHeads",
      [](Programs& p) {
        for (Buffer& b : p[0].buffers) {
          if (b.kind == BufferKind::kQueries) b.rows.blocks.push_back(b.rows.blocks[0]);
        }
      },
      "is not one block of queries"));
  list.push_back(in(
      mesh, "OwnQueriesOfAnotherRank",
      [](Programs& p) { p[0].buffers[kOwnQueriesBuffer].rows = rows_of(p[1], kOwnQueriesBuffer); },
      "its third buffer is not its own queries"));
  list.push_back(in(
      mesh, "OwnResultsOfAnotherRank",
      [](Programs& p) { p[0].buffers[kOwnResultsBuffer].rows = rows_of(p[1], kOwnResultsBuffer); },
      "its fourth buffer is not its own queries' results"));
  list.push_back(in(
      mesh, "ZeroedResults", [](Programs& p) { p[0].forward[0].zero.push_back(kOwnResultsBuffer); },
      "holds no gradients"));
  list.push_back(in(
      mesh, "QueriesSentAsKeys",
      [](Programs& p) {
        for (Buffer& b : p[1].buffers) {
          if (b.kind == BufferKind::kQueries) b.kind = BufferKind::kKV;
        }
      },
      "heads that do not exist"));
  list.push_back(in(
      all_pairs(ScheduleKind::kAllGather), "QueriesInAPlanThatMovesNone",
      [](Programs& p) { add_buffer(p[0], BufferKind::kResults, rows_of(p[0], kOwnKVBuffer)); },
      "but the program has no buffers of its own queries"));
  return list;
}

}  // namespace annulus::testing
