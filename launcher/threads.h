// The threads of a process of annulus that compute: how many they are, and how they wait for one another. Used by
// program.cc, rank_locations.cc and subcommands/doctor.cc.
//
// Threads of OpenMP (LibTorch's operators, its BLAS and annulus's own kernels) wait for each other after every parallel
// part. By default GNU's library lets a waiting thread spin for milliseconds. That gains microseconds on an idle
// machine. But if another program wants the processor, or if a control group allows less processors' time than there
// are threads, the spinning takes the time of the threads that have work. So in every program that contains this file,
// waiting threads spin for some microseconds and then sleep, unless the user has decided. As the library reads this
// from variables when it is initialized, the program sets them and starts itself once more, before anything else
// (threads.cc).
#pragma once

#include <optional>
#include <string>

namespace annulus {

// Sets the number of threads: `placed`, that of the rank's place, or if there is none, LibTorch's own number, but no
// more than the control group has processors' time for. A number that the user set (OMP_NUM_THREADS) has precedence.
void set_threads(std::optional<int> placed);

// How many threads this process computes with and how they wait, for `doctor`: "4, for the time of 3.5 processors that
// the control group /a allows; they wait by OMP_WAIT_POLICY=passive". Call it after set_threads.
std::string threads_text();

}  // namespace annulus
