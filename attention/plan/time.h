// The time that a plan takes on a machine, predicted. As for memory, each part says what it takes (step_costs), and one
// sweep over the steps puts the parts in order: each rank has a clock, and a transfer waits for both of its ends.
// Also the terms by which a schedule is chosen: machine, hosts and memory. Used by choice.h, by what asks for a choice
// (modules, training, attend), `annulus plan` and `annulus bench plan`. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/plan/machine.h"
#include "attention/plan/plan.h"
#include "comm/hosts.h"

namespace annulus {

// The terms of a request: the machine is found as find_machine does, where an empty name stands for that in
// ANNULUS_MACHINE, if it is set. Machines are read once in a process. Raises as find_machine does. Thread safe.
TermsPointer terms_of(const std::string& machine, std::string_view where, std::string_view device, int64_t head_dim,
                      int64_t element_bytes, bool backward = true);

// The same terms in a job whose ranks are on these hosts: each has as many consecutive ranks as it has, whatever the
// machine says. Hosts that differ, or whose ranks are not consecutive, leave the machine's number.
TermsPointer on_hosts(const TermsPointer& terms, const RankHosts& hosts);

// The same terms where attention may hold at most so many bytes on a rank, or as many as the machine has if that is
// less. `or_leanest` is for callers who know only what was free before: where nothing fits so many, what holds least is
// chosen. Terms by which the leanest is taken stay as they are.
TermsPointer within_memory(const TermsPointer& terms, double bytes, bool or_leanest = false);

// A number of seconds for people: "2.1 ms".
std::string seconds_text(double seconds);

// The sizes from which the bytes of rows follow (row_content of traffic.h).
struct RowBytes {
  int64_t head_dim = 128;
  int64_t element_bytes = 2;

  int64_t accumulator_bytes() const { return element_bytes == 8 ? 8 : 4; }
  int64_t of(BufferKind kind, bool backward) const;
};

// What one step of a rank takes by itself.
struct StepCost {
  struct Part {
    int peer = 0;
    double bytes = 0;
    friend bool operator==(const Part&, const Part&) = default;
  };
  double compute = 0;  // seconds of kernels
  // Seconds of what no transfer overlaps: packing rows, additions, and in the last step what is done once with the
  // rank's own tensors.
  double add = 0;
  std::vector<Part> sends, receives;
};

// Returns the costs of a program's steps in one direction. Pairs that a mask hides count as if it did not.
std::vector<StepCost> step_costs(const Program& program, bool backward, const MachineProfile& machine,
                                 const RowBytes& bytes);

// Returns the most bytes that a rank holds in one direction: what the plan stores, and the tensors of its own queries.
double bytes_held(const Program& program, bool backward, const RowBytes& bytes);

// Where a rank's time goes: seconds = compute + add + exposed.
struct RankTime {
  double seconds = 0;  // until the rank has ended its last step
  double compute = 0;
  double add = 0;
  double exposed = 0;  // of transfers, and of waiting for other ranks, that no computation hides
  double latency = 0;  // the part of `exposed` that would remain with links of unlimited bandwidth
  double busy = 0;     // of the rank's links, hidden or not: its own bytes and messages, both ends
  double bytes = 0;    // sent
};

// The steps of one rank.
struct RankSteps {
  int rank = 0;
  std::vector<StepCost> steps;
};

// What a rank does when in one step of a direction, in seconds from the beginning of the direction.
struct StepClock {
  double begin = 0;
  double computed = 0;                     // its tiles are computed
  double sent_from = 0, sent = 0;          // its transfers, from when both ends are ready; both 0 if it sends nothing
  double received_from = 0, received = 0;  // likewise
  double waited = 0;                       // tiles and transfers are done, and the additions begin
  double end = 0;
};

// Predicts the time of each of these ranks. If they are not all of `ranks`, the others are assumed to begin each step
// when the rank that waits for them does.
//
// All transfers of a step begin when both ranks have begun it or, without overlap, have computed its tiles. The rows
// that a rank sends share its link, and so do the rows that it receives; ranks that share a NIC share its bandwidth.
// Inside a host and between hosts are separate links, which work at the same time. A step ends with the computation and
// with the last transfer, whichever is later, and then its additions run. `clocks`, if it is given, becomes the clock
// of each of `some` in each of its steps.
std::vector<RankTime> sweep(const std::vector<RankSteps>& some, int ranks, const MachineProfile& machine,
                            std::vector<std::vector<StepClock>>* clocks = nullptr);

// The rank that ends last; all zero if there is none.
RankTime slowest(const std::vector<RankTime>& times);

}  // namespace annulus
