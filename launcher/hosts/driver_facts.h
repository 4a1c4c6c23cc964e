// Facts about NVIDIA's driver and its GPUs, without starting CUDA. They come from the kernel's files and from the
// driver's own libraries, which are opened at run time, so that no build needs them. Used by host_facts.cc, and by
// tests with stand-in libraries; it has never been run against a real driver.
//
// Thread safety: one caller at a time.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// The driver's version, "580.65.06", or "" without a driver. Tests pass the folder that holds /proc as `root`.
std::string driver_version(const std::string& root = "");

// The number of GPUs that the driver has, or -1 without a driver.
int gpus_of_driver(const std::string& root = "");

// The newest CUDA version that the driver supports, "13.0", or "" if it is not known.
std::string cuda_of_driver(const std::string& library = "libcuda.so.1");

// The text "13.0" for 13000, CUDA's own form of the version.
std::string cuda_version_text(int version);

// [gpu][gpu]: whether a GPU may read another's memory, in the order of their PCI bus ids. Empty if the driver does not
// tell, or shows this process fewer than two GPUs.
std::vector<std::vector<bool>> peer_access(const std::string& library = "libnvidia-ml.so.1");

}  // namespace annulus
