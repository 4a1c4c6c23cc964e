// Decides whether a rank is stuck, from what its host sees of it again and again. Used by host_watch.cc. No function
// here uses a process or a clock. Thread safety: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>

namespace annulus {

// What is seen of a rank at one time.
struct RankGlance {
  bool stopped = false;          // its process is stopped (SIGSTOP)
  uint64_t own = 0;              // the pieces of work that its main thread has done so far
  uint64_t others = 0;           // and its other threads
  bool expected = false;         // it is to make progress, or to wait for other ranks
  bool waits = false;            // its main thread waits for its other threads
  bool waits_for_ranks = false;  // its main thread waits for other ranks
  bool lasting = false;          // it is in a phase that may last
};

// The rule for one rank. A rank is stuck if its process is stopped for `after` seconds, or if its main thread makes no
// progress for so long, and does not wait for other ranks: of several ranks that stand still, those that wait for one
// that is stuck are not the culprits. While the main thread waits for other threads of its rank, their progress counts.
// Without progress a rank may be
// - ten times as long in a phase that may last;
// - three times as long as it has already been and then went on, outside of such phases: that is how long its pieces of
//   work take.
class StuckRule {
 public:
  static constexpr double kLasting = 10, kLonger = 3;

  explicit StuckRule(double after) : after_(after) {}

  // Takes what is seen now, `elapsed` seconds after the last time. If the rank is stuck, returns for how many seconds
  // it has stood still.
  std::optional<double> look(const RankGlance& now, double elapsed);

 private:
  const double after_;
  std::optional<RankGlance> last_;
  double still_ = 0;    // seconds without progress
  double stopped_ = 0;  // seconds for which the process has been stopped
  double longest_ = 0;  // seconds without progress after which it went on
};

}  // namespace annulus
