// Which faults happen on which ranks, and when: with_faults() (faults.h) carries a plan out on a Communicator, and
// libannulus_mpi_faults.so (mpi_faults.cc) on a program that calls MPI itself. Needs no LibTorch.
//
// As text: faults separated by semicolons, each a kind with what it takes,
//
//   kill:rank=1,nth=3; delay:rank=0,nth=5,seconds=0.2; drop:rank=2,nth=1; seed=7,within=20,faults=2
//
// The last form draws faults from a seed. `nth` counts a rank's calls from 1 on: for delay, kill and stop all that
// communicate, for the others those that send messages to single ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus::testing {

struct Fault {
  enum class Kind {
    kDelay,      // the call begins `seconds` later
    kDrop,       // its messages are never sent, which the sender does not notice
    kDuplicate,  // its messages are sent twice, one after the other
    kReorder,    // each of its messages is sent after the rank's next one to the same rank
    kKill,       // the rank ends at once (between threads: by an exception)
    kStop,       // the rank stands still for ever
  };
  Kind kind = Kind::kDelay;
  int rank = 0;
  int64_t nth = 1;
  double seconds = 0.1;  // of a delay

  bool of_messages() const { return kind == Kind::kDrop || kind == Kind::kDuplicate || kind == Kind::kReorder; }
};

struct FaultPlan {
  std::vector<Fault> faults;

  // Returns `count` faults of any kind, on any of the ranks, at one of the first `within` calls.
  static FaultPlan drawn(uint64_t seed, int ranks, int64_t within, int count = 1);
  // ranks: of the job. Raises Error(kUsage) for a text of another form and for a rank that is not there.
  static FaultPlan parse(std::string_view text, int ranks);
  std::string text() const;  // parse() reads it
};

// Counts the calls of one rank, and says what happens at each.
class FaultCounter {
 public:
  FaultCounter(FaultPlan plan, int rank);

  struct Now {
    double delay = 0;  // seconds
    bool kill = false, stop = false, drop = false, duplicate = false, reorder = false;
  };
  // For the rank's next call; `sends`: whether it sends messages to single ranks.
  Now next(bool sends);

 private:
  std::vector<Fault> mine_;
  int64_t calls_ = 0, sending_calls_ = 0;
};

}  // namespace annulus::testing
