// For tests: the GPUs of this machine. A build without CUDA has none.
#pragma once

#include <string>

namespace annulus::comm_test {

int gpu_count();
void use_gpu(int device);  // for this thread

// Returns the GPU of rank `rank` of `ranks` processes on this host. If there are fewer GPUs than ranks, ranks share
// them and the environment variables that NCCL needs for this are set. Call before NCCL makes a communicator.
int gpu_of_process(int rank, int ranks);

// Returns why `ranks` processes on this host cannot use its GPUs: NCCL's reason, or that there are more ranks than GPUs
// and each GPU takes only one process. Empty if they can.
std::string unavailable_to_processes(int ranks);

}  // namespace annulus::comm_test
