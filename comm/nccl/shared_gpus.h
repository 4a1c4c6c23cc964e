// Refuses ranks that share a GPU where NCCL would not let them. It uses neither CUDA nor NCCL. Used by nccl_factory.cc.
#pragma once

#include <string>
#include <vector>

namespace annulus::nccl_internal {

// What NCCL knows a rank's GPU by.
struct GpuIdentity {
  std::string host;     // the host's name, for messages
  std::string machine;  // differs between machines, also where their names are equal
  std::string pci;      // the PCI bus id of the GPU; empty if it is not known
  std::string host_id;  // NCCL_HOSTID; processes for which it differs count as on different hosts

  // For the exchange between ranks. of_text() takes what text() returned.
  std::string text() const;
  static GpuIdentity of_text(const std::string& text);
};

// Reads the host's name, the machine and NCCL_HOSTID of this process.
GpuIdentity identity_of(const std::string& pci);

// What lets several processes use one GPU with this version of NCCL: "set NCCL_MULTI_RANK_GPU_ENABLE=1" from 2.30 on,
// before that an NCCL_HOSTID of each process. Empty if this process's environment has it already. version: of the
// loaded NCCL, as ncclGetVersion() gives it (22809 is 2.28.9).
std::string gpu_sharing_remedy(int version);

// Raises Error(kPlan), with the remedy, if two of the ranks, given in rank order, use the same GPU and NCCL would
// refuse that: their NCCL_HOSTID is the same, and this process has not set NCCL_MULTI_RANK_GPU_ENABLE=1 for a version
// that knows it.
void refuse_shared_gpus(const std::vector<GpuIdentity>& gpus, int version);

// 22809 -> "2.28.9"
std::string nccl_version_text(int version);

}  // namespace annulus::nccl_internal
