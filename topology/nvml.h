// What the NVIDIA driver says of GPUs, through its own library (NVML), which is opened when it is asked: no build needs
// it. Used by host.cc, and by tests with a library of their own.
//
// Thread safety: one caller at a time.
#pragma once

#include <string>

#include "topology/machine.h"

namespace annulus {

// The driver's library, as the system finds it.
inline constexpr const char* kNvmlLibrary = "libnvidia-ml.so.1";

// Completes a machine of this system by what the driver lets this process see; false where there is no such library, or
// no driver behind it, and the machine is as it was.
// - GPUs: those that the driver shows and no others. In a container the PCI bus shows the GPUs of the whole host.
// - Their names, and their memory where it is not known.
// - NVLink, where hwloc has shown none: directly between GPUs, and through NVSwitches, over which all GPUs that lead to
//   one reach each other. The speeds are those that the driver states, of all links of a pair together.
bool add_nvml(Machine& machine, const std::string& library = kNvmlLibrary);

}  // namespace annulus
