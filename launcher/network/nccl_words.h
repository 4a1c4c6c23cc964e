// Which network devices NCCL took, by its own words: it has no call that says so, but it writes them down where
// NCCL_DEBUG=INFO asks for it. For the first lines of `train`, beside the nearest by the topology.
//
// Thread safety: ask_nccl_for_words changes the environment and belongs where no other thread reads it.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

// Lets NCCL write what concerns the network into memory of this process, unless the user listens already (NCCL_DEBUG or
// NCCL_DEBUG_FILE is set) or it was asked before. Before NCCL is first used.
void ask_nccl_for_words();

// The devices in what NCCL has written, as devices_in_words says. Empty where NCCL was not asked or has not spoken.
std::string nccl_devices();

// From NCCL's log. The devices that channels to other hosts go through, "mlx5_0:1 mlx5_3:1", in the order of their
// first channel; before there is any, "one of mlx5_0:1 mlx5_1:1", those that it chooses from; else empty. Lines read:
//   NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
//   Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/1/GDRDMA
std::string devices_in_words(std::string_view log);

}  // namespace annulus
