// What the kernel and NVIDIA's driver say about this process and its processors while it runs: the memory that it has,
// and clocks. The metrics of a run sample them. Linux only. Thread safe.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

// Returns the bytes of this process that are in the host's memory now; 0 if the kernel does not tell. `root`: a prefix
// of the kernel's paths, for tests.
int64_t resident_bytes(const std::string& root = "");

// Returns the frequency in MHz at which processor `cpu` runs now; 0 if it cannot be read, as in virtual machines
// without cpufreq.
double processor_mhz(int cpu, const std::string& root = "");
// The same for the processor that the calling thread is on.
double processor_mhz();

// Returns the frequency in MHz at which the multiprocessors of the GPU with this PCI bus id ("00000000:1B:00.0") run
// now; 0 if the driver does not tell. It asks NVML, which is loaded at run time, so no build needs it, and stays
// loaded. It has never run with a real driver.
double gpu_mhz(const std::string& bus_id, const std::string& library = "libnvidia-ml.so.1");

}  // namespace annulus
