// Queries the NVIDIA driver through its library (NVML), which is loaded at run time (dlopen), so no build needs it.
// Used by host.cc; tests use a fake library. It has not run with a real driver.
//
// Thread safety: one caller at a time.
#pragma once

#include <string>

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

}  // namespace annulus
