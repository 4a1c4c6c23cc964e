// Reads what the NVIDIA driver says about GPUs through its library (NVML), which is opened at run time, so no build
// needs it. host.cc uses it; tests replace the library by one of their own. It has not run with a real driver.
//
// Thread safety: one caller at a time.
#pragma once

#include <string>

#include "launcher/topology/machine.h"

namespace annulus {

// The driver's library, as the system finds it.
inline constexpr const char* kNvmlLibrary = "libnvidia-ml.so.1";

// Completes a machine of this system with what the driver shows to this process. Returns false and leaves the machine
// unchanged if there is no such library, or no driver behind it.
// - GPUs: only those that the driver shows. In a container the PCI bus shows the GPUs of the whole host.
// - The names of the GPUs, and their memory where it is not known yet.
// - NVLink, if hwloc has shown none: directly between GPUs, and through NVSwitches, over which all GPUs with links to
//   the same switch reach each other. Speeds are the driver's, added up over all links of a pair.
bool add_nvml(Machine& machine, const std::string& library = kNvmlLibrary);

}  // namespace annulus
