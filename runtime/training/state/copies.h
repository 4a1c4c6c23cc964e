// Compares what several ranks hold alike, to find bits that a rank's memory or processor has changed without an error
// (run.compare_copies): the weights that the model computes with, and what ranks hold whole otherwise.
// ModelState::digests() makes the digests; Training::step compares them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

struct Config;
class ModelState;

// A part of the state that all ranks hold alike.
struct HeldAlike {
  std::string what;  // "the weights of layer 3"
  uint64_t digest = 0;
};

// Which ranks hold other bits than the others.
struct UnequalCopies {
  std::string what;        // the first part that differs
  int parts = 1;           // how many differ
  std::vector<int> ranks;  // ascending
  bool majority = true;    // the others all hold the same; otherwise the copies do not tell who is right
};

// Compares digests[rank][part]. If the ranks differ, those are named that differ from the largest group of equal ones;
// all of them if there is no largest one: of three copies the odd one, of two both. Thread safe.
std::optional<UnequalCopies> find_unequal(const std::vector<std::string>& parts,
                                          const std::vector<std::vector<uint64_t>>& digests);

// Raises Error(kResource) on every rank if the digests of a part differ, with the ranks and hosts that find_unequal()
// names. Collective, over comm.host(): 8 bytes a part and rank.
void require_equal_copies(Communicator& comm, const std::vector<HeldAlike>& held, int64_t step);

// Does so in each run.compare_copies-th step, and in those after which a checkpoint is written: before the update, so
// that a copy that has changed can still be told from the others. Collective.
void compare_copies(const Config& config, ModelState& state, Communicator& world, int64_t step);

}  // namespace annulus
