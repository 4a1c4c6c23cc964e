// Queries the NVIDIA driver without starting CUDA: through the kernel's files, and through the driver's libraries
// (NVML, libcuda), which are loaded at run time (dlopen), so no build needs them. Used by host.cc and
// launcher/hosts/host_facts.cc; tests use fake libraries. It has not run with a real driver.
//
// Thread safety: one caller at a time.
#pragma once

#include <string>
#include <vector>

#include "launcher/topology/machine.h"

namespace annulus {

// The default name of the library.
inline constexpr const char* kNvmlLibrary = "libnvidia-ml.so.1";

// Adds the driver's information to a machine of this system. Returns false, with the machine unchanged, if there is no
// such library or no driver.
// - GPUs: only those visible to this process. In a container the PCI bus has the GPUs of the whole host.
// - The names of the GPUs, and their memory if it is unknown.
// - NVLink, if hwloc reports none: between GPUs, and through NVSwitches, which connect all GPUs with links to the same
//   switch. Bandwidths are the driver's, summed over all links of a pair.
bool add_nvml(Machine& machine, const std::string& library = kNvmlLibrary);

// Returns the driver's version, "580.65.06", or "" without a driver. Tests pass the folder that holds /proc as `root`.
std::string driver_version(const std::string& root = "");

// Returns the number of GPUs that the driver has, or -1 without a driver.
int gpus_of_driver(const std::string& root = "");

// Returns the newest CUDA version that the driver supports, "13.0", or "" if it is not known.
std::string cuda_of_driver(const std::string& library = "libcuda.so.1");

// Returns "13.0" for 13000, CUDA's own form of the version.
std::string cuda_version_text(int version);

// Returns for [gpu][gpu] whether a GPU may read another's memory, in the order of their PCI bus ids. Empty if the
// driver does not report it, or fewer than two GPUs are visible to this process.
std::vector<std::vector<bool>> peer_access(const std::string& library = kNvmlLibrary);

}  // namespace annulus
