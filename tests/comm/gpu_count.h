// The GPUs of this machine, for tests; none in a build without CUDA.
#pragma once

namespace annulus::comm_test {

int gpu_count();
void use_gpu(int device);  // for this thread

}  // namespace annulus::comm_test
