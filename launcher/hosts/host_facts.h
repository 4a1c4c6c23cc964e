// Makes the report of the host that this process runs on. The hidden subcommand `host`, which host discovery starts on
// every host, sends it to the launcher; `doctor` makes that of its own host.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/host_report.h"

namespace annulus {

struct FactsRequest {
  std::vector<std::string> files;  // paths of the files whose digests the report holds
  bool devices = true;             // whether to query the driver and NCCL, which takes about a second with GPUs
};

// Starts neither MPI nor CUDA. A fact that cannot be found keeps its value in an empty report. Throws
// Error(kUnavailable) only if the machine cannot be read at all, and Error(kUsage) if ANNULUS_ISA has an unknown value.
// Thread safety: one caller at a time, because it forks to try process_vm_readv.
HostReport report_of_this_host(const FactsRequest& request);

// The current UTC time in seconds since 1970.
double utc_now();

// A text that stands for the content of a file: its checksum; for a file of more than 64 MiB (a shard of tokens), its
// size and the checksum of its first and last MiB; "folder" for a folder; "missing: No such file or directory" (with
// the system's message) if it cannot be read.
std::string digest_of_file(const std::string& path);

}  // namespace annulus
