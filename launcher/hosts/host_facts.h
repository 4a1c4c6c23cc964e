// The report of the host that this process runs on. The verb `host` (hidden; the survey starts it on every host)
// sends it to the launcher; `doctor` and `launch` call it for their own.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/host_report.h"

namespace annulus {

struct FactsRequest {
  std::vector<std::string> files;  // whose digests are asked for
  bool devices = true;             // ask the driver and NCCL, which takes a second with GPUs
};

// Starts no MPI and nothing of CUDA. What cannot be found out is left as it is in an empty report; raises
// Error(kUnavailable) only where the machine cannot be read at all, and Error(kUsage) where ANNULUS_ISA is no word of
// ours. Thread safety: one caller at a time (it forks to try process_vm_readv).
HostReport report_of_this_host(const FactsRequest& request);

// What stands for the content of a file: its checksum; of one of more than 64 MiB (a shard of tokens), its size and the
// checksum of its first and last MiB; "folder" for a folder; "missing: No such file or directory" where it cannot be
// read.
std::string digest_of_file(const std::string& path);

}  // namespace annulus
