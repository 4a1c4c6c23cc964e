// Simulated hosts for tests in C++: a test that mpi_test(hosts = 2) or annulus_add_mpi_test(... HOSTS 2) starts runs
// over hosts host1, host2, ... of this machine, network namespaces with an address, process table and /dev/shm each, on
// one switch (python/annulus/testing/hosts.py). Its ranks lie on them in order, and can cut them off:
//
//   if (comm.rank() == 0) annulus::testing::cut_host("host2");
//
// The functions ask the process that started the test, over a socket that no cut affects, and return when it is done.
// They raise Error(kUsage) where there are no simulated hosts or no such host, and Error(kUnavailable) where the kernel
// cannot do it. Thread safe. Needs no LibTorch. tc's units: bytes per second, milliseconds and percent, each way.
#pragma once

#include <string>

namespace annulus::testing {

// Whether this process runs on a simulated host.
bool on_simulated_host();

// Pulls the host's cable: what it sends and what is sent to it is lost.
void cut_host(const std::string& host);
// Puts it back.
void mend_host(const std::string& host);
// Lets the host's link carry only so much, above 0, by the kernel's tbf. This and disturb_host() replace each other.
void limit_host(const std::string& host, double bytes_per_second);
// Delays and loses what the link carries, by the kernel's netem, which not all machines have.
void disturb_host(const std::string& host, double milliseconds, double loss);
// Ends the host with all its processes; not the first one, on which mpirun is.
void kill_host(const std::string& host);

}  // namespace annulus::testing
