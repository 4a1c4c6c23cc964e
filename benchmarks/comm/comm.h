// `annulus bench comm`: what communication between ranks costs, over plain MPI on the same buffers in turn, and how
// long a job takes to start. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"
#include "comm/communicator.h"

namespace annulus {

struct CommBenchOptions {
  int64_t smallest = 1 << 10, largest = 64 << 20;  // bytes of a message; each is four times the one before
  int64_t rounds = 7;                              // turns that count; one more runs first
  std::vector<std::string> parts;                  // empty: all of comm_bench_parts()
};

// "barrier", "exchange", "exchange inside hosts", ...
std::vector<std::string> comm_bench_parts();

// Collective over `world`, a communicator over MPI that has all ranks in the order of MPI_COMM_WORLD: every operation
// and size, plain MPI and annulus in turn. A size is that of what one rank sends to another: a message of an exchange,
// a rank's piece of an all_gather and a reduce_scatter, the whole of an all_reduce and a broadcast. Rank 0 prints a
// table; the ratios are the same on every rank. Raises Error(kPlan) where it has one rank, and where a part that
// is asked for needs hosts that these ranks are not on.
std::vector<BenchRatio> run_comm_bench(const CommBenchOptions& options, Communicator& world, std::ostream& out);

// When a rank of a job that starts got how far, in seconds of the clock that all processes of a host share.
struct StartTimes {
  double process = 0;  // it was made
  double program = 0;  // its libraries were loaded and its words read
  double joined = 0;   // it was a rank of a job
  double model = 0;    // data and model were there
  double step = 0;     // the first step was made
};

// Of this process, of which the program has run until now.
StartTimes start_times_of_process();
// Collective: a model of one layer and its first step; the last rank's times, written to `path` by rank 0.
void start_and_step(Communicator& world, StartTimes times, const std::string& path);
StartTimes read_start_times(const std::string& path);
// "process 0.41 s, ..." of a start that began at `began`.
std::string start_text(const StartTimes& times, double began);

}  // namespace annulus
