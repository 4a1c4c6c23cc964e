// Tests of common/control_groups/: the groups of a process and the processors' time that they allow, according to the
// kernel's files on hosts, in containers and in jobs, in both versions.
#include "common/control_groups/control_groups.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace annulus::control_groups_test {
namespace {

namespace fs = std::filesystem;

using Files = std::map<std::string, std::string>;

// Calls `ask` with a folder that holds these files of a kernel.
template <typename Ask>
auto with_files(const Files& files, const Ask& ask) {
  std::string name = ::testing::TempDir() + "/root-XXXXXX";
  const std::string root = ::mkdtemp(name.data());
  for (const auto& [path, text] : files) {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  const auto found = ask(root);
  fs::remove_all(root);
  return found;
}

std::optional<CpuQuota> quota(const Files& files) {
  return with_files(files, [](const std::string& root) { return cpu_quota(root); });
}

TEST(ControlGroups, ListsGroupsFromTheInnermost) {
  const Files files = {{"/proc/self/cgroup", "12:cpu,cpuacct:/a/b\n5:memory:/m\nnonsense\n1:name=systemd:/a\n0::/u\n"}};
  const auto texts = with_files(files, [](const std::string& root) {
    std::vector<std::string> found;
    for (const ControlGroup& group : control_groups("cpu", root)) {
      found.push_back(std::to_string(group.version) + " " + group.name + " " + group.folder.substr(root.size()));
    }
    return found;
  });
  EXPECT_EQ(texts, (std::vector<std::string>{"1 /a/b /sys/fs/cgroup/cpu/a/b", "1 /a /sys/fs/cgroup/cpu/a",
                                             "1 / /sys/fs/cgroup/cpu", "1 /a/b /sys/fs/cgroup/cpu,cpuacct/a/b",
                                             "1 /a /sys/fs/cgroup/cpu,cpuacct/a", "1 / /sys/fs/cgroup/cpu,cpuacct",
                                             "2 /u /sys/fs/cgroup/u", "2 / /sys/fs/cgroup",
                                             "2 /u /sys/fs/cgroup/unified/u", "2 / /sys/fs/cgroup/unified"}));
}

TEST(CpuQuota, IsTheLeastOfAllGroupsAbove) {
  Files files = {{"/proc/self/cgroup", "0::/job/step\n"},
                 {"/sys/fs/cgroup/job/step/cpu.max", "400000 100000\n"},
                 {"/sys/fs/cgroup/job/cpu.max", "75000 50000\n"},
                 {"/sys/fs/cgroup/cpu.max", "max 100000\n"}};
  EXPECT_EQ(quota(files), (CpuQuota{1.5, "/job"}));
  files["/sys/fs/cgroup/job/step/cpu.max"] = "20000 100000\n";
  EXPECT_EQ(quota(files), (CpuQuota{0.2, "/job/step"}));
}

// In a container the group is "/", or a path of the host that does not exist in the container.
TEST(CpuQuota, IsThatOfAContainer) {
  for (const std::string group : {"/", "/docker/0123"}) {
    EXPECT_EQ(quota({{"/proc/self/cgroup", "0::" + group + "\n"}, {"/sys/fs/cgroup/cpu.max", "100000 100000\n"}}),
              (CpuQuota{1, "/"}));
    EXPECT_EQ(quota({{"/proc/self/cgroup", "4:cpu,cpuacct:" + group + "\n"},
                     {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n"},
                     {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"}}),
              (CpuQuota{2.5, "/"}));
  }
}

TEST(CpuQuota, IsReadInBothVersionsTogether) {
  Files files = {{"/proc/self/cgroup", "2:cpu:/a\n0::/b\n"},
                 {"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "300000\n"},
                 {"/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"},
                 {"/sys/fs/cgroup/unified/b/cpu.max", "200000 100000\n"}};
  EXPECT_EQ(quota(files), (CpuQuota{2, "/b"}));
  files["/sys/fs/cgroup/unified/b/cpu.max"] = "max 100000\n";
  EXPECT_EQ(quota(files), (CpuQuota{3, "/a"}));
}

TEST(CpuQuota, IsNoneWithoutALimit) {
  EXPECT_EQ(quota({}), std::nullopt);
  EXPECT_EQ(quota({{"/proc/self/cgroup", "0::/a\n"}}), std::nullopt);
  EXPECT_EQ(quota({{"/proc/self/cgroup", "0::/a\n"}, {"/sys/fs/cgroup/a/cpu.max", "max 100000\n"}}), std::nullopt);
  EXPECT_EQ(quota({{"/proc/self/cgroup", "2:cpu:/\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}}),
            std::nullopt);
  for (const char* text : {"", "x", "0 100000", "100000", "100000 0", "nan nan"}) {
    EXPECT_EQ(quota({{"/proc/self/cgroup", "0::/a\n"}, {"/sys/fs/cgroup/a/cpu.max", text}}), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace annulus::control_groups_test
