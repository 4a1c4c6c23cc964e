// The GPUs of this machine, for tests; none in a build without CUDA.
#pragma once

namespace annulus::comm_test {

int gpu_count();
void use_gpu(int device);  // for this thread

// The GPU of rank `rank` of `ranks` processes on this host: one each where there are as many, otherwise they share, and
// the environment is given what NCCL wants to see then. Call before NCCL makes a communicator.
int gpu_of_process(int rank, int ranks);

}  // namespace annulus::comm_test
