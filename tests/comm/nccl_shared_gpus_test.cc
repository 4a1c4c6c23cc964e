// Tests which ranks that share a GPU are refused, and what the error suggests. It needs no GPU.
#include "comm/nccl/shared_gpus.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "common/error.h"

namespace annulus::nccl_internal::nccl_shared_gpus_test {
namespace {

constexpr int kOld = 22809, kNew = 23004;  // NCCL 2.28.9 and 2.30.4

GpuIdentity gpu(const std::string& host, const std::string& pci, const std::string& host_id = "") {
  return {host, "boot of " + host, pci, host_id};
}

std::string refusal(const std::vector<GpuIdentity>& gpus, int version) {
  try {
    refuse_shared_gpus(gpus, version);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kPlan);
    return std::string(e.message());
  }
  return "";
}

class SharedGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
    unsetenv("NCCL_HOSTID");
  }
};

TEST_F(SharedGpus, DifferentGpusPass) {
  EXPECT_EQ(refusal({gpu("a", "0000:1b:00.0"), gpu("a", "0000:1c:00.0"), gpu("b", "0000:1b:00.0")}, kOld), "");
  EXPECT_EQ(refusal({gpu("a", ""), gpu("a", "")}, kOld), "");  // CUDA reports no PCI bus ids
}

TEST_F(SharedGpus, MachinesMayHaveOneName) {
  const GpuIdentity here{"node", "boot 1", "0000:1b:00.0", ""}, there{"node", "boot 2", "0000:1b:00.0", ""};
  EXPECT_EQ(refusal({here, there}, kOld), "");
}

TEST_F(SharedGpus, AreRefusedWithTheRemedyOfThisVersion) {
  const std::vector<GpuIdentity> gpus = {gpu("a", "0000:1b:00.0"), gpu("a", "0000:1c:00.0"), gpu("a", "0000:1b:00.0")};
  const std::string both = "ranks 0 and 2 use the same GPU (a 0000:1b:00.0), but NCCL ";
  const std::string allows =
      " allows one rank per GPU: start as many ranks as there are GPUs, or, to try several ranks "
      "on one GPU, ";
  EXPECT_EQ(refusal(gpus, kOld),
            both + "2.28.9" + allows + "start each rank as a process with an NCCL_HOSTID of its own");
  EXPECT_EQ(refusal(gpus, kNew), both + "2.30.4" + allows + "set NCCL_MULTI_RANK_GPU_ENABLE=1");
}

TEST_F(SharedGpus, PassWithTheVariableOfThisVersion) {
  EXPECT_EQ(refusal({gpu("a", "0000:1b:00.0", "1"), gpu("a", "0000:1b:00.0", "2")}, kOld), "");
  const std::vector<GpuIdentity> gpus = {gpu("a", "0000:1b:00.0", "1"), gpu("a", "0000:1b:00.0", "1")};
  EXPECT_NE(refusal(gpus, kOld), "") << "the same NCCL_HOSTID";
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_EQ(refusal(gpus, kNew), "");
  EXPECT_NE(refusal(gpus, kOld), "") << "an older NCCL does not know the variable";
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0", 1);
  EXPECT_NE(refusal(gpus, kNew), "");
}

TEST_F(SharedGpus, TheRemedyIsEmptyWhereItHasBeenTaken) {
  EXPECT_EQ(gpu_sharing_remedy(kOld), "start each rank as a process with an NCCL_HOSTID of its own");
  EXPECT_EQ(gpu_sharing_remedy(kNew), "set NCCL_MULTI_RANK_GPU_ENABLE=1");
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_NE(gpu_sharing_remedy(kOld), "");
  EXPECT_EQ(gpu_sharing_remedy(kNew), "");
  setenv("NCCL_HOSTID", "rank 3", 1);
  EXPECT_EQ(gpu_sharing_remedy(kOld), "");
}

TEST_F(SharedGpus, IdentitiesTravelAsText) {
  setenv("NCCL_HOSTID", "rank 3, of mine", 1);
  const GpuIdentity own = identity_of("0000:1b:00.0"), came = GpuIdentity::of_text(own.text());
  EXPECT_FALSE(own.host.empty());
  EXPECT_FALSE(own.machine.empty());
  EXPECT_EQ(own.host_id, "rank 3, of mine");
  EXPECT_EQ(came.host, own.host);
  EXPECT_EQ(came.machine, own.machine);
  EXPECT_EQ(came.pci, "0000:1b:00.0");
  EXPECT_EQ(came.host_id, own.host_id);
}

}  // namespace
}  // namespace annulus::nccl_internal::nccl_shared_gpus_test
