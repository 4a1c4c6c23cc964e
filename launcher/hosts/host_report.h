// The report of a host, made before a job starts there or for `doctor`: versions, limits, devices, interfaces, clock.
// host_facts.h makes it on each host, host discovery sends it as JSON to the launcher, and host_checks.h checks it.
//
// Thread safe: plain data and functions without state.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "launcher/topology/host.h"

namespace annulus {

// Limits of this process, which its ranks inherit; -1: unlimited. These are the soft limits unless noted.
struct Limits {
  int64_t locked_bytes = -1;  // RLIMIT_MEMLOCK; -1 with CAP_IPC_LOCK, for which it does not apply
  int64_t open_files = -1;    // RLIMIT_NOFILE, the hard limit
  int64_t processes = -1;     // RLIMIT_NPROC, which does not apply to root
};

// The space on the file system of a folder.
struct Space {
  std::string path;
  int64_t free_bytes = 0;  // what this user may still use
  int64_t total_bytes = 0;
  bool writable = false;
};

struct HostReport {
  std::string name;     // the system's host name
  std::string listed;   // the name in the job's list of hosts, set by host discovery; empty without one
  std::string boot_id;  // identifies the kernel and its network namespace: the same for two names of one machine
  std::string user;
  bool root = false;

  std::string program;         // the path of this binary
  std::string program_digest;  // its checksum (common/checksum.h)
  std::string folder_digest;   // checksum of an installation's list of files (tools/install.py); empty for a build
  std::string version;         // the version of annulus
  std::string architecture;    // "x86_64"
  std::string isa;             // the vector instructions that annulus uses: "AVX-512"
  std::string kernel;          // "6.1.0-18-amd64"
  std::string libtorch;        // the version of the loaded library
  std::string libtorch_path;   // and its file
  std::string mpi_library;     // the version of the loaded MPI library: "Open MPI v4.1.4"; empty: none is loaded
  std::string mpirun;          // its path, or why there is none
  std::string mpirun_version;  // "4.1.4"; empty: there is no mpirun

  double clock_seconds = 0;   // UTC in seconds, when the report was made
  double clock_offset = 0;    // this clock minus the launcher's in seconds, set by host discovery; 0 without one
  double clock_accuracy = 0;  // half of the round trip in which the offset was measured, in seconds

  Limits limits;
  Space shm, tmp, work;   // /dev/shm, $TMPDIR or /tmp, the current folder
  int ptrace_scope = -1;  // /proc/sys/kernel/yama/ptrace_scope; -1: there is none
  bool cma = false;       // whether process_vm_readv works between processes of this user, tried as Open MPI does

  Host host;
  int hwloc_gpus = 0;                          // the number of GPUs that hwloc shows on the PCI bus
  int driver_gpus = -1;                        // the number of GPUs that the driver has; -1: there is no driver
  std::string driver;                          // the version of NVIDIA's driver; empty: there is none
  std::string driver_cuda;                     // the newest CUDA that the driver supports, "13.0"
  std::string build_cuda;                      // the CUDA that this program was built for; empty: none
  std::string torch_cuda;                      // the major version of the CUDA that LibTorch was built for; empty: none
  std::string nccl, nccl_loaded;               // the NCCL version that it was built for, and the loaded version
  std::string nccl_path, nccl_of_torch;        // the file of the loaded NCCL, and of LibTorch's own; empty: none
  std::vector<std::vector<bool>> peer_access;  // [gpu][gpu] (nvidia_driver.h); empty: not known

  // ANNULUS_*, those of OpenMP (is_of_openmp), NCCL_*, UCX_*, OMPI_*, CUDA_VISIBLE_DEVICES
  std::map<std::string, std::string> environment;
  std::map<std::string, std::string> files;  // files that the job reads: the path as typed -> its digest_of_file
  // What this host could not connect to over TCP: "b at 10.0.0.2:41234 (Connection timed out)".
  std::vector<std::string> unreachable;
};

// Texts come from the system and may not be UTF-8, so dump the result with error_handler_t::replace.
nlohmann::json report_to_json(const HostReport& report);
// Reads a report, all of which is checked. `name` and `version` are required; other missing members keep their values
// in an empty report. In a report from another version of annulus, so do malformed members, so that the difference of
// versions can be reported. Throws Error(kInput), which names `source` and the member.
HostReport report_from_json(const nlohmann::json& json, const std::string& source);

}  // namespace annulus
