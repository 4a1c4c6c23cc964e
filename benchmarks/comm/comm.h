// `annulus bench comm`: the cost of communication between ranks compared with plain MPI on the same buffers, in turn
// within one run; and how long a job takes to start. Called by program/comm_word.cc.
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
  std::vector<std::string> parts;                  // names from comm_bench_parts(); empty: all of them
};

// The names of the parts: "barrier", "exchange", "exchange inside hosts", ...
std::vector<std::string> comm_bench_parts();

// Collective over `world`, a communicator over MPI that has all ranks in the order of MPI_COMM_WORLD. Measures every
// operation and size, with plain MPI and annulus in turn. The size is that of a message in an exchange, of one rank's
// piece in an all_gather or reduce_scatter, and of the whole tensor in an all_reduce or broadcast. Rank 0 prints a
// table; every rank returns the same ratios. Raises Error(kPlan) if the world has one rank, and if a requested part
// needs several hosts with the same number of neighbouring ranks and these ranks are placed otherwise.
std::vector<BenchRatio> run_comm_bench(const CommBenchOptions& options, Communicator& world, std::ostream& out);

// The times at which a rank of a starting job reached each stage, in seconds of CLOCK_MONOTONIC, which all processes of
// a host share.
struct StartTimes {
  double process = 0;  // the process was created
  double program = 0;  // its libraries were loaded and its command line was read
  double joined = 0;   // it had joined the job as a rank
  double model = 0;    // the data and the model were ready
  double step = 0;     // the first step was done
};

// `process` of this process, and the current time as `program`; the other times are 0.
StartTimes start_times_of_process();
// Collective: makes a model of one layer and runs its first step. Rank 0 writes the times, each the latest of all
// ranks, to `path`; it raises Error(kResource) if it cannot.
void start_and_step(Communicator& world, StartTimes times, const std::string& path);
// Raises Error(kInput) if the file does not hold the times of a start.
StartTimes read_start_times(const std::string& path);
// A row of a table: the seconds of each stage of a start that began at `began`, and the sum of all stages.
std::string start_text(const StartTimes& times, double began);

}  // namespace annulus
