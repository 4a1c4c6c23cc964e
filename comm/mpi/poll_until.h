// How a rank waits for messages over MPI: it spins, then sleeps. Internal to comm/mpi, used by the wait of every
// operation. Thread safe.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>

#include "comm/communicator.h"
#include "comm/deadline.h"

namespace annulus::mpi_internal {

// How far a transfer has come. poll_until() decides by it whether to spin or to sleep.
struct Movement {
  int64_t events = 0;  // messages that have been matched or are complete
  int64_t open = 0;    // bytes of the messages that are not complete, apart from tensors that are lent
};

// The expected duration of the rest of a transfer on this host. Before anything of it has come, this is the duration of
// a fast transfer, 20 us and 8 GB/s: if it takes longer, another rank is probably still computing, perhaps on this
// core. After the first event the peer takes part. Both ranks must then call MPI until the transfer is complete,
// because each call moves a piece; 1 GB/s allows for memory that other ranks use as well.
inline Seconds expected_time(Movement moved) {
  return Seconds(20e-6 + static_cast<double>(moved.open) / (moved.events == 0 ? 8e9 : 1e9));
}

// Calls done() until it returns true or the deadline has passed, and returns what done() returned last. It spins,
// yielding to other threads, for the expected duration of the transfer, and again after each new event of movement().
// Then it sleeps between bursts of calls, each time for an eighth of the time waited since, from 10 us to 1 ms. So it
// notices a message that is late by t within about t/8 (800 us late: within 100 us), and a waiting rank leaves its core
// to other ranks.
//
// A burst is limited in time, not in calls: where ranks share cores, MPI yields in each call, and each yield costs two
// switches to other ranks that wait as well. A count of calls took a third of a job's processor time (4 ranks, 2
// cores).
template <typename Done, typename Moves>
bool poll_until(Done done, Moves movement, comm_internal::Clock::time_point deadline) {
  constexpr Seconds kBurst(5e-6), kLongBurst(80e-6);
  // What is larger takes several calls, each of which moves a piece.
  constexpr int64_t kPiece = int64_t{1} << 16;
  auto start = comm_internal::Clock::now();
  auto now = start;
  bool moves = false;  // whether pieces of a large message are coming
  for (int64_t events = 0;;) {
    // Once they do, more calls are made before yielding, so that it does not yield after every megabyte.
    const auto end = now + std::chrono::duration_cast<comm_internal::Clock::duration>(moves ? kLongBurst : kBurst);
    do {
      if (done()) return true;
      now = comm_internal::Clock::now();
    } while (now < end);
    if (now >= deadline) return done();
    const Movement moved = movement();
    if (std::exchange(events, moved.events) != moved.events) start = now;
    moves = moved.events > 0 && moved.open > kPiece;
    const Seconds waited = now - start, expected = expected_time(moved);
    if (waited < expected) {
      sched_yield();
    } else {
      const Seconds pause(std::clamp((waited - expected).count() / 8, 10e-6, 1e-3));
      std::this_thread::sleep_for(std::min<Seconds>(pause, deadline - now));
    }
    now = comm_internal::Clock::now();
  }
}

}  // namespace annulus::mpi_internal
