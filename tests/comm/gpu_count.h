// The GPUs of this machine, for tests; none in a build without CUDA.
#pragma once

#include <string>

namespace annulus::comm_test {

int gpu_count();
void use_gpu(int device);  // for this thread

// The GPU of rank `rank` of `ranks` processes on this host: one each where there are as many, otherwise they share, and
// the environment is given what NCCL wants to see then. Call before NCCL makes a communicator.
int gpu_of_process(int rank, int ranks);

// Why `ranks` processes on this host cannot use its GPUs: NCCL's reason, or more ranks than GPUs, and GPUs that take
// one process each. Empty when they can.
std::string unavailable_to_processes(int ranks);

}  // namespace annulus::comm_test
