// What a rank says to the launcher over its connection (rank.h), as supervisor.cc takes it. Thread safety: plain data
// and a function without state.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/error.h"

namespace annulus {

// Its rank in the job, which differs from that of mpirun if bootstrap renumbers the ranks.
struct RankNumber {
  int number = 0;
};

// It has started on this host; what it says of its beat is for Watchers::add_rank, null: it has none.
struct RankStarted {
  std::string host;
  nlohmann::json beat = {};
};

// A record of its log, as json_text writes it.
struct RankRecord {
  std::string text;
  bool shown = false, of_one = false;
};

// The newest step of training that is done.
struct RankProgress {
  int64_t step = 0;
};

// The newest checkpoint of a run, and the command that continues from it; empty: the run is complete.
struct RankCheckpoint {
  int64_t step = 0;
  std::string folder;
  std::vector<std::string> command;
};

// It ends with this error; whether it has been shown; and the rank that caused it, -1: this one or unknown.
struct RankFailure {
  Error error;
  bool reported = false;
  int cause = -1;
};

// It ends with this exit code.
struct RankExit {
  int code = 0;
};

using RankMessage =
    std::variant<RankNumber, RankStarted, RankRecord, RankProgress, RankCheckpoint, RankFailure, RankExit>;

// Reads a message, a line, of a rank in a job of so many. Throws Error(kInput) if it is none.
RankMessage rank_message_of(std::string_view line, int ranks);

}  // namespace annulus
