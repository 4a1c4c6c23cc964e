// What NVIDIA's driver says of itself and of GPUs, without starting CUDA: from the kernel's files and from the driver's
// own libraries, which are opened when they are asked, so that no build needs them. Used by host_facts.cc, and by tests
// with libraries of their own.
//
// Thread safety: one caller at a time.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// "580.65.06"; empty without a driver. `root`: where the kernel's files are, for tests.
std::string driver_version(const std::string& root = "");

// The GPUs that the driver has; -1 without a driver.
int gpus_of_driver(const std::string& root = "");

// The newest CUDA that the driver takes, "13.0"; empty where it does not say.
std::string cuda_of_driver(const std::string& library = "libcuda.so.1");

// "13.0" of 13000.
std::string cuda_version_text(int version);

// [gpu][gpu]: whether a GPU may read another's memory; in the order of their PCI bus ids. Empty where the driver does
// not say, or shows this process less than two.
std::vector<std::vector<bool>> peer_access(const std::string& library = "libnvidia-ml.so.1");

}  // namespace annulus
