// Finds out from NCCL's log which network devices NCCL uses. NCCL has no function for this, but with NCCL_DEBUG=INFO it
// logs them. The first lines of `train` show them beside the nearest devices by the topology. Used by
// launcher/rank_locations.cc. It has never read the log of a real NCCL; tests use logs that were written down.
//
// Thread safety: record_nccl_log changes the environment; call it while no other thread reads it.
#pragma once

#include <string>

namespace annulus {

// Makes NCCL log its use of the network into memory of this process, unless the user already reads its log (NCCL_DEBUG
// or NCCL_DEBUG_FILE is set). Call it before NCCL is first used; further calls do nothing.
void record_nccl_log();

// devices_in_nccl_log for what NCCL has logged so far. "" if NCCL was not asked or has logged nothing.
std::string nccl_devices();

// Parses NCCL's log. Returns the devices that channels to other hosts use, "mlx5_0:1 mlx5_3:1", in the order of their
// first channel; before there is a channel, the devices that NCCL chooses from, "one of mlx5_0:1 mlx5_1:1"; or "". It
// reads lines such as
//   NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
//   Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/1/GDRDMA
std::string devices_in_nccl_log(const std::string& log);

}  // namespace annulus
