// Planted mistakes in tiles and in the transfer of their gradients. See planted_mistakes.h.
#include <stdexcept>
#include <utility>

#include "attention/plan/schedules.h"
#include "tests/attention/plan/planted_changes.h"

namespace annulus::testing {
namespace {

// Returns the first tile of a program for which `wanted` holds. The mistake cannot be planted in a plan without one.
template <typename Wanted>
Tile& find_tile(std::vector<Step>& steps, const Wanted& wanted) {
  for (Step& step : steps) {
    for (Tile& tile : step.tiles) {
      if (wanted(tile)) return tile;
    }
  }
  throw std::logic_error("the plan has no tile that this mistake needs");
}

Tile& tile_of_buffer(std::vector<Step>& steps, int buffer) {
  return find_tile(steps, [&](const Tile& t) { return t.buffer == buffer; });
}

// Cuts a tile after the first half of its keys; returns the two parts, which are adjacent in the step.
std::pair<Tile*, Tile*> split(std::vector<Step>& steps, const Tile& tile) {
  for (Step& step : steps) {
    for (size_t i = 0; i < step.tiles.size(); ++i) {
      if (&step.tiles[i] != &tile) continue;
      Tile second = tile;
      step.tiles.insert(step.tiles.begin() + static_cast<std::ptrdiff_t>(i) + 1, second);
      Tile &a = step.tiles[i], &b = step.tiles[i + 1];
      const int64_t n = a.key_rows.count / 2;
      for (Span Tile::*keys : {&Tile::key_rows, &Tile::key_positions, &Tile::grad_rows}) {
        if ((a.*keys).empty()) continue;
        b.*keys = (a.*keys).sub(n, (a.*keys).count - n);
        a.*keys = (a.*keys).sub(0, n);
      }
      return {&a, &b};
    }
  }
  throw std::logic_error("the tile is not of these steps");
}

// Whether blocks a and b have the same rows but different batch rows (`in_batch`) or heads, so that a tile of one could
// name the other.
bool differs(const RowBlock& a, const RowBlock& b, bool in_batch) {
  return in_batch ? !(a.batch == b.batch) && a.heads == b.heads : a.batch == b.batch && !(a.heads == b.heads);
}
void name_other_block(Programs& p, bool backward, bool gradient, bool in_batch) {
  for (Program& program : p) {
    for (Step& step : backward ? program.backward : program.forward) {
      for (Tile& t : step.tiles) {
        int& number = gradient ? t.grad_block : t.block;
        const std::vector<RowBlock>& blocks =
            program.buffers[static_cast<size_t>(gradient ? t.grad_buffer : t.buffer)].rows.blocks;
        for (size_t other = 0; other < blocks.size(); ++other) {
          const RowBlock& named = blocks[static_cast<size_t>(number)];
          if (!differs(named, blocks[other], in_batch) || !(named.positions == blocks[other].positions)) continue;
          number = static_cast<int>(other);
          return;
        }
      }
    }
  }
  throw std::logic_error("the plan has no two blocks of the same positions");
}

}  // namespace

std::vector<Mistake> of_tiles() {
  PlanRequest masked = ring_of_four();
  std::vector<uint8_t> shown(static_cast<size_t>(masked.shape.q_len * masked.shape.k_len));
  for (size_t i = 0; i < shown.size(); ++i) shown[i] = i % 3 != 0;
  const auto mask_of = [shape = masked.shape](const std::vector<uint8_t>& pairs) {
    return std::make_shared<const TokenMask>(token_mask_from_dense(pairs.data(), 1, 1, shape.q_len, shape.k_len));
  };
  masked.pattern.mask = given_mask(mask_of(shown));
  shown[static_cast<size_t>(5 * masked.shape.k_len + 3)] ^= 1;  // a pair of rank 0
  const auto other = mask_of(shown);
  const PlanRequest all_gather = all_pairs(ScheduleKind::kAllGather);
  const PlanRequest blocks = several_blocks(ScheduleKind::kGroupCast);
  const std::string elsewhere = "which are stored elsewhere";
  return {
      {"KeysReadFromGradients", all_gather,
       [](Programs& p) { tile_of_buffer(p[0].backward, kOwnKVBuffer).buffer = kOwnGradBuffer; },
       "reads keys from a buffer that holds none"},
      {"QueriesOfOtherRows", all_gather,
       [](Programs& p) {
         // The two halves of the queries are exchanged.
         Tile& first = tile_of_buffer(p[0].forward, kOwnKVBuffer);
         Tile second = first;
         first.query_positions = {0, 1, 8}, first.query_rows = {8, 1, 8};
         second.query_positions = {8, 1, 8}, second.query_rows = {0, 1, 8};
         p[0].forward[0].tiles.push_back(second);
       },
       elsewhere},
      {"ABlockThatDoesNotExist", blocks, [](Programs& p) { tile_of_buffer(p[0].forward, kOwnKVBuffer).block = 9; },
       elsewhere},
      {"KeysOfAnotherBatchRow", blocks, [](Programs& p) { name_other_block(p, false, false, true); }, elsewhere},
      {"KeysOfAnotherHead", blocks, [](Programs& p) { name_other_block(p, false, false, false); }, elsewhere},
      {"ATileOfNoBatchRow", all_gather,
       [](Programs& p) {
         Tile t = p[0].forward[0].tiles[0];
         t.batch.count = 0;
         p[0].forward[0].tiles.push_back(t);
       },
       elsewhere},
      {"ATileOfNoHead", all_gather,
       [](Programs& p) {
         Tile t = p[0].forward[0].tiles[0];
         t.heads.count = 0;
         p[0].forward[0].tiles.push_back(t);
       },
       elsewhere},
      {"ARowNamedTwice", all_gather,
       [](Programs& p) {
         // Two keys are at one position, and their weights cancel out in the fingerprint.
         Tile t = p[0].forward[0].tiles[0];
         t.key_rows = {3, 0, 2};
         t.key_positions = {t.key_positions.begin + 3, 0, 2};
         p[0].forward[0].tiles.push_back(t);
       },
       elsewhere},
      {"RowsBeyondTheirSpan", all_gather,
       [](Programs& p) {
         // Of two adjacent blocks the first tile takes one key too many and the second tile one too few.
         Tile& first = tile_of_buffer(p[0].forward, kOwnKVBuffer);
         Tile& second = find_tile(p[0].forward, [](const Tile& t) { return t.key_positions.begin == 16; });
         ++first.key_rows.count;
         ++first.key_positions.count;
         second.key_rows = second.key_rows.sub(1, 15);
         second.key_positions = second.key_positions.sub(1, 15);
       },
       elsewhere},
      {"ARowBeforeTheFirst", all_gather,
       [](Programs& p) {
         Tile& first = find_tile(p[0].forward, [](const Tile& t) { return t.key_positions.begin == 0; });
         Tile& second = find_tile(p[0].forward, [](const Tile& t) { return t.key_positions.begin == 16; });
         first.key_rows.count -= 1;
         first.key_positions.count -= 1;
         second.key_rows = {-1, 1, 17};
         second.key_positions = {15, 1, 17};
       },
       elsewhere},
      {"ATileWithoutItsMask", masked, [](Programs& p) { p[0].forward[0].tiles[0].mask = -1; },
       "are not the pattern's pairs"},
      {"AMaskThatDoesNotExist", masked, [](Programs& p) { tile_of_buffer(p[0].backward, kOwnKVBuffer).mask = 1; },
       "names a mask"},
      {"AnotherBitOfAMask", masked, [other](Programs& p) { p[0].masks[0].mask = other; },
       "are not the pattern's pairs"},
      {"FewerRowsThanKeys", all_gather, [](Programs& p) { --p[0].forward[0].tiles[0].key_rows.count; }, elsewhere},
      {"RowsOfAnotherStride", all_gather,
       [](Programs& p) {
         const auto [a, b] = split(p[0].forward, tile_of_buffer(p[0].forward, kOwnKVBuffer));
         a->key_rows.stride = 2;
       },
       elsewhere},
      {"ShiftedRows", all_gather,
       [](Programs& p) {
         const auto [a, b] = split(p[0].forward, tile_of_buffer(p[0].forward, kOwnKVBuffer));
         a->key_rows.begin += 1;
       },
       elsewhere},
      {"GradientsAddedToKeys", all_gather,
       [](Programs& p) {
         Program& r = p[0];
         const int keys = add_buffer(r, BufferKind::kSavedKV, rows_of(r, kOwnKVBuffer));
         transfer(p, 0, kOwnKVBuffer, 0, keys, 0, false, rows_of(r, kOwnKVBuffer));
         r.saved = keys;
         tile_of_buffer(r.backward, kOwnKVBuffer).grad_buffer = keys;
       },
       "adds its gradients to a buffer that holds none"},
      {"ShiftedGradientRows", blocks,
       [](Programs& p) {
         for (Program& r : p) {
           for (Step& step : r.backward) {
             for (Tile& t : step.tiles) {
               if (t.grad_rows.count < 4) continue;
               split(r.backward, t).first->grad_rows.begin += 1;
               return;
             }
           }
         }
         throw std::logic_error("no tile of four keys");
       },
       "to rows that are not its keys'"},
      {"GradientsOfAnotherBatchRow", blocks, [](Programs& p) { name_other_block(p, true, true, true); },
       "to rows that are not its keys'"},
      {"GradientsOfAnotherHead", blocks, [](Programs& p) { name_other_block(p, true, true, false); },
       "to rows that are not its keys'"},
      {"ABatchRowLeftOut", blocks,
       [](Programs& p) {
         Tile& t = find_tile(p[0].forward, [](const Tile& tile) { return tile.batch.count == 2; });
         t.batch.count = 1;
       },
       "its tiles are not the pattern's pairs"},
  };
}

std::vector<Mistake> of_gradients() {
  const PlanRequest all_gather = all_pairs(ScheduleKind::kAllGather);
  const PlanRequest ring = with(ring_of_four(), ScheduleKind::kRing);
  // In the backward of all-gather, step 1 computes gradients of the other ranks' keys and step 2 sends them to their
  // owners.
  const auto first_sent = [](Program& r) { return r.backward[2].sends[0].buffer; };
  return {
      {"ZeroedKeys", ring,
       [](Programs& p) {
         p[1].backward[0].zero.push_back(add_buffer(p[1], BufferKind::kKV, rows_of(p[1], kOwnKVBuffer)));
       },
       "zeroes a buffer that holds no gradients"},
      {"ZeroedWhileItArrives", all_gather,
       [](Programs& p) { p[0].backward[2].zero.push_back(p[0].backward[2].receives[0].buffer); }, "while it travels"},
      {"ZeroedAfterTheTiles", all_gather,
       [](Programs& p) {
         p[0].backward[1].zero.push_back(kOwnGradBuffer);
         p[0].backward[0].zero.clear();
       },
       "before it is filled"},
      {"ATileAddsToWhatTravels", all_gather,
       [first_sent](Programs& p) {
         std::vector<Tile>& tiles = p[0].backward[1].tiles;
         for (size_t i = 0; i < tiles.size(); ++i) {
           if (tiles[i].grad_buffer != first_sent(p[0])) continue;
           p[0].backward[2].tiles.push_back(tiles[i]);
           tiles.erase(tiles.begin() + static_cast<std::ptrdiff_t>(i));
           return;
         }
       },
       "while it travels"},
      {"AnAdditionToWhatTravels", all_gather,
       [first_sent](Programs& p) {
         // The sum is computed in the step that sends it, so the message does not contain it.
         const int sent = first_sent(p[0]);
         const int part = add_buffer(p[0], BufferKind::kGrad, rows_of(p[0], sent));
         p[0].backward[1].zero.push_back(part);
         p[0].backward[2].adds.push_back({sent, part});
       },
       "while it travels, or after it left"},
      {"AnAdditionToWhatHasLeft", all_gather,
       [first_sent](Programs& p) {
         const int sent = first_sent(p[0]);
         const int part = add_buffer(p[0], BufferKind::kGrad, rows_of(p[0], sent));
         p[0].backward[1].zero.push_back(part);
         p[0].backward.emplace_back().adds.push_back({sent, part});
       },
       "after it left"},
      {"KeysAddedToGradients", all_gather,
       [](Programs& p) {
         p[0].backward[1].adds.push_back({kOwnGradBuffer, kOwnKVBuffer});
       },
       "adds buffers that hold no gradients"},
      {"GradientsOfOtherKeysAdded", all_gather,
       [](Programs& p) {
         // Rank 0 sends rows of rank 1 to rank 2 and rows of rank 2 to rank 1.
         const auto swap_rows = [](Program& home, const RowSet& rows) {
           Transfer& in = transfer_with(home.backward[2].receives, 0);
           in.rows = rows;
           home.buffers[static_cast<size_t>(in.buffer)].rows = rows;
         };
         Transfer &one = transfer_with(p[0].backward[2].sends, 1), &two = transfer_with(p[0].backward[2].sends, 2);
         std::swap(one.buffer, two.buffer);
         std::swap(one.rows, two.rows);
         swap_rows(p[1], one.rows);
         swap_rows(p[2], two.rows);
       },
       "adds gradients of other rows"},
      {"AddedBeforeItIsFilled", all_gather,
       [](Programs& p) {
         const int never = add_buffer(p[0], BufferKind::kGrad, rows_of(p[0], kOwnGradBuffer));
         p[0].backward[1].adds.push_back({kOwnGradBuffer, never});
       },
       "adds buffer"},
      {"KeptButNeverCame", ring,
       [](Programs& p) {
         Program& r = p[1];
         const int saved = r.saved;
         r.saved = add_buffer(r, BufferKind::kSavedKV, rows_of(r, saved));
         for (Step& step : r.backward) {
           for (Tile& t : step.tiles) t.buffer = t.buffer == saved ? r.saved : t.buffer;
           for (Transfer& t : step.sends) t.buffer = t.buffer == saved ? r.saved : t.buffer;
         }
       },
       "the keys and values to keep for the backward never arrive"},
      {"OwnGradientsNeverSet", no_pairs(),
       [](Programs& p) {
         for (Step& step : p[0].backward) step.zero.clear();
       },
       "are never set"},
      {"OwnGradientsLeave", all_gather,
       [](Programs& p) {
         const int elsewhere = add_buffer(p[0], BufferKind::kGrad, rows_of(p[0], kOwnGradBuffer));
         p[0].backward.front().zero.push_back(elsewhere);
         p[0].backward.back().adds.push_back({elsewhere, kOwnGradBuffer});
       },
       "leave it 1 times instead of 0"},
      {"GradientsAddedToThemselves", all_gather,
       [](Programs& p) {
         for (Step& step : p[0].backward) {
           for (Add& a : step.adds) a.dst = a.src;
         }
       },
       "to itself"},
      {"GradientsThatNobodyFetches", all_gather,
       [](Programs& p) {
         Transfer& out = p[0].backward[2].sends[0];
         Program& home = p[static_cast<size_t>(out.peer)];
         const int part = transfer_with(home.backward[2].receives, 0).buffer;
         std::erase_if(home.backward[2].adds, [&](const Add& a) { return a.src == part; });
       },
       "lost or counted twice"},
  };
}

}  // namespace annulus::testing
