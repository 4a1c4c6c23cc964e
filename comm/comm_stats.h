// What a communicator has counted (Communicator::stats). Metrics read the times, tests all of it.
#pragma once

#include <cstdint>

namespace annulus {

// Totals since construction. Operations that raised an error are not counted.
struct CommStats {
  // The messages of this rank's exchanges. A message without elements is not counted.
  int64_t messages_sent = 0;
  int64_t bytes_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_received = 0;
  int64_t bytes_to_other_hosts = 0;  // the part of bytes_sent that went to ranks of other hosts (Communicator::hosts)
  int64_t bytes_lent = 0;            // the part of bytes_sent that was lent (lending.h)
  // The number of collectives, barriers and splits included, and the sum of their payloads in bytes. The payload is the
  // tensor that is reduced or broadcast, and the larger tensor of an all_gather and a reduce_scatter (nccl-tests counts
  // in the same way). A collective that was begun is counted when it is found to be complete.
  int64_t collectives = 0;
  int64_t collective_payload = 0;
  // The bytes that each of N ranks sends for these collectives, on average over the ranks, with an algorithm that sends
  // the fewest: (N-1)/N of the payload of an all_gather, a reduce_scatter or a broadcast, twice that for an all_reduce
  // (with N = 4 and a payload of 1,000 bytes: 750, and 1,500). The CPU backends send exactly that for an all_gather and
  // a reduce_scatter (except that between hosts sums of bf16 travel in fp32). For other collectives MPI and NCCL choose
  // the algorithm and do not report which.
  int64_t collective_bytes_sent = 0;
  // The bytes that this rank sent to ranks of other hosts for all_gathers, reduce_scatters and all_reduces on a CPU,
  // without headers. If the ranks of each host are consecutive, all ranks together send (H-1) times the payload over H
  // hosts, and twice that for an all_reduce; where a host has several ranks, sums of bf16 count as fp32. The threads
  // backend, which sends nothing, counts what the other CPU backends would send.
  int64_t collective_bytes_to_other_hosts = 0;
  // Exposed communication in seconds. On a CPU: the time for which the process was blocked in Work::wait() and in
  // blocking collectives. On a GPU: the time for which the current stream was idle in Work::wait() or a collective; it
  // is added by progress() once the device has reached that point. The time for which the CPU sides wait for each other
  // is in host().stats().
  double wait_seconds = 0;
  // Parts of wait_seconds, by kind of operation. Barriers, splits and agreement alone are in the total only.
  double exchange_wait_seconds = 0;
  double reduce_wait_seconds = 0;  // all_reduce, reduce_scatter
  double gather_wait_seconds = 0;  // all_gather, broadcast
};

}  // namespace annulus
