// Tests which network devices are read from NCCL's log, with lines in NCCL's format that no real job has written.
#include "launcher/network/nccl_log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace annulus::nccl_log_test {
namespace {

constexpr const char* kStart =
    "node0:4744:4763 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/IB/SHARP [10]mlx5_10:2/IB [RO]; OOB "
    "eth0:172.30.0.25<0>\n"
    "node0:4744:4763 [0] NCCL INFO Using network IB\n";

TEST(NcclLog, ListCandidateDevicesBeforeAnyChannel) {
  EXPECT_EQ(devices_in_nccl_log(kStart), "one of mlx5_0:1 mlx5_1:1 mlx5_10:2");
  EXPECT_EQ(devices_in_nccl_log("x [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n"), "eth0");
  EXPECT_EQ(devices_in_nccl_log("NCCL INFO NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [RO]; \n"),
            "mlx5_0:1");
  EXPECT_EQ(devices_in_nccl_log(""), "");
  EXPECT_EQ(devices_in_nccl_log("NET/\nNET/IB : Using\nNET/IB : Using [\n[0] via NET/\nvia NET/IB\n"), "");
}

TEST(NcclLog, ListDevicesOfChannels) {
  const std::string log = std::string(kStart) +
                          "n:1:2 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/10/GDRDMA\n"
                          "n:1:2 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [send] via NET/IB/10/GDRDMA\n"
                          "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
                          "n:1:2 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA/Shared\n";
  EXPECT_EQ(devices_in_nccl_log(log), "mlx5_10:2 mlx5_0:1");
  EXPECT_EQ(devices_in_nccl_log("NCCL INFO Channel 00 : 3[b1000] -> 4[18000] [send] via NET/AWS Libfabric/3/GDRDMA"),
            "AWS Libfabric 3");
}

TEST(NcclLog, KeepUserNcclDebug) {
  setenv("NCCL_DEBUG", "WARN", 1);
  record_nccl_log();
  EXPECT_STREQ(std::getenv("NCCL_DEBUG"), "WARN");
  EXPECT_EQ(std::getenv("NCCL_DEBUG_FILE"), nullptr);
  EXPECT_EQ(nccl_devices(), "");
}

// NCCL opens the file by its name and keeps it open; the test does the same.
TEST(NcclLog, AreReadAndLeaveNoFile) {
  std::string folder = ::testing::TempDir() + "words-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  setenv("TMPDIR", folder.c_str(), 1);
  unsetenv("NCCL_DEBUG");
  record_nccl_log();
  ASSERT_NE(std::getenv("NCCL_DEBUG_FILE"), nullptr);
  std::ofstream nccl(std::getenv("NCCL_DEBUG_FILE"));
  nccl << kStart << std::flush;
  // The name is gone even if the devices are never read, as in `attend`.
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  EXPECT_EQ(nccl_devices(), "one of mlx5_0:1 mlx5_1:1 mlx5_10:2");
  nccl << "n:1:2 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/10/GDRDMA\n" << std::flush;
  EXPECT_EQ(nccl_devices(), "mlx5_10:2");
  std::filesystem::remove(folder);
}

}  // namespace
}  // namespace annulus::nccl_log_test
