// What a host says of itself before a job starts there, or when `doctor` asks: versions, limits, devices, interfaces,
// clock. Gathered by host_facts.h on each host, sent as JSON through the back channel, judged by host_checks.h.
//
// Thread safety: plain data and functions without state.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "topology/host.h"

namespace annulus {

// A limit of the system's that this process has and its ranks inherit (the soft one); -1: unlimited.
struct Limits {
  int64_t locked_bytes = -1;  // RLIMIT_MEMLOCK, which does not hold for who has CAP_IPC_LOCK
  int64_t open_files = -1;    // RLIMIT_NOFILE, the hard limit
  int64_t processes = -1;     // RLIMIT_NPROC, which does not hold for root
};

// Space on the file system of a folder.
struct Space {
  std::string path;
  int64_t free_bytes = 0;  // for this user
  int64_t total_bytes = 0;
  bool writable = false;
};

struct HostReport {
  std::string name;     // as the system calls it
  std::string listed;   // as the job's list of hosts calls it, told by the survey; empty without one
  std::string boot_id;  // of the kernel and its network namespace: the same on two names of one machine
  std::string user;
  bool root = false;

  std::string program;         // the path of this binary
  std::string program_digest;  // checksum (common/checksum.h) of it
  std::string folder_digest;   // of the list of files of an installation (tools/install.py); empty for a build
  std::string version;         // of annulus
  std::string architecture;    // "x86_64"
  std::string isa;             // the vector instructions that are computed with: "AVX-512"
  std::string kernel;          // "6.1.0-18-amd64"
  std::string libtorch;        // the version of the library that was loaded, and its file
  std::string libtorch_path;
  std::string mpi_library;     // the version of the MPI library that is loaded: "Open MPI v4.1.4"; empty: none is
  std::string mpirun;          // its path, or why there is none
  std::string mpirun_version;  // "4.1.4"; empty: there is none

  double clock_seconds = 0;   // UTC, when the report was made
  double clock_offset = 0;    // against the launcher's, by the survey: positive where it is ahead; 0 on one host
  double clock_accuracy = 0;  // half the round trip by which the offset was found

  Limits limits;
  Space shm, tmp, work;   // /dev/shm, $TMPDIR or /tmp, the current folder
  int ptrace_scope = -1;  // /proc/sys/kernel/yama/ptrace_scope; -1: there is none
  bool cma = false;       // process_vm_readv from another process of this user works, as Open MPI tries it

  Host host;
  int hwloc_gpus = 0;                          // that the PCI bus shows
  int driver_gpus = -1;                        // that the driver has; -1: there is no driver to ask
  std::string driver;                          // of NVIDIA, its version; empty without
  std::string driver_cuda;                     // the newest CUDA that the driver takes, "13.0"
  std::string build_cuda;                      // that this program was built for; empty: none
  std::string nccl, nccl_loaded;               // the version built for, and the one that was loaded
  std::string nccl_path, nccl_of_torch;        // the file of that, and of the one that LibTorch brings; empty: none
  std::vector<std::vector<bool>> peer_access;  // [gpu][gpu]; empty: not known

  std::map<std::string, std::string>
      environment;                           // ANNULUS_*, NCCL_*, UCX_*, OMPI_*, CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS
  std::map<std::string, std::string> files;  // files that the job reads, as typed -> what stands for their content
                                             // (digest_of_file), or "missing: ..."
  // What this host could not connect to over TCP: "b at 10.0.0.2:41234 (Connection timed out)".
  std::vector<std::string> unreachable;
};

// Texts are as the system gave them, which need not be UTF-8: dump with error_handler_t::replace.
nlohmann::json report_to_json(const HostReport& report);
// Error(kInput) names `source` and the member. Nothing of it is trusted. Members that are missing stay as in an empty
// report; of a report by another version of annulus, which is to be said and not stumbled over, those that cannot be
// read, too. `name` and `version` must be there.
HostReport report_from_json(const nlohmann::json& json, const std::string& source);

}  // namespace annulus
