// Tests of memory/available.h: the available memory according to the kernel's files on hosts and in containers.
#include "memory/available.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace annulus::available_test {
namespace {

namespace fs = std::filesystem;

std::optional<AvailableMemory> available(const std::map<std::string, std::string>& files) {
  std::string name = ::testing::TempDir() + "/root-XXXXXX";
  const std::string root = ::mkdtemp(name.data());
  for (const auto& [path, text] : files) {
    fs::create_directories(fs::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  const auto found = available_memory(root);
  fs::remove_all(root);
  return found;
}

const std::string kHost = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n";

TEST(AvailableMemory, IsTheHostsWithoutOtherLimits) {
  const auto found = available({{"/proc/meminfo", kHost}, {"/proc/self/cgroup", "0::/user.slice\n"}});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->bytes, int64_t{20000000} * 1024);
  EXPECT_EQ(found->limit, "the host's memory");
  EXPECT_FALSE(available({}));
}

// A parent cgroup may have the lower limit. Cached files do not count, because the kernel drops them when needed.
TEST(AvailableMemory, IsBoundedByEveryParentCgroup) {
  const std::map<std::string, std::string> files = {
      {"/proc/meminfo", kHost},
      {"/proc/self/cgroup", "0::/job/step\n"},
      {"/sys/fs/cgroup/job/step/memory.max", "max\n"},
      {"/sys/fs/cgroup/job/step/memory.current", "500\n"},
      {"/sys/fs/cgroup/job/memory.max", "16000000000\n"},
      {"/sys/fs/cgroup/job/memory.current", "7000000000\n"},
      {"/sys/fs/cgroup/job/memory.stat", "anon 4000000000\ninactive_file 2000000000\nactive_file 5\n"},
  };
  const auto found = available(files);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->bytes, 11000000000);
  EXPECT_EQ(found->limit, "the limit of 16.0 GB of the control group /job");
}

// In a container the cgroup is "/" or a path of the host that does not exist in the container.
TEST(AvailableMemory, IsBoundedByAContainer) {
  for (const std::string group : {"/", "/docker/0123"}) {
    const auto found = available({{"/proc/meminfo", kHost},
                                  {"/proc/self/cgroup", "0::" + group + "\n"},
                                  {"/sys/fs/cgroup/memory.max", "1000"},
                                  {"/sys/fs/cgroup/memory.current", "3000"}});
    ASSERT_TRUE(found);
    EXPECT_EQ(found->bytes, 0) << "more is used than is allowed";
    EXPECT_EQ(found->limit, "the limit of 0.0 MB of the control group /");
  }
}

TEST(AvailableMemory, IsBoundedByCgroupsOfVersion1) {
  std::map<std::string, std::string> files = {
      {"/proc/meminfo", kHost},
      {"/proc/self/cgroup", "12:cpu,cpuacct:/a\n5:memory:/a/b\n1:name=systemd:/a\n0::/a\n"},
      {"/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9000000000"},
      {"/sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "5000000000"},
      {"/sys/fs/cgroup/memory/a/b/memory.stat", "inactive_file 1\ntotal_inactive_file 1000000000\n"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"},
      {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000000000"},
  };
  auto found = available(files);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->bytes, 5000000000);
  files["/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"] = "9223372036854771712";
  found = available(files);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->limit, "the host's memory");
}

TEST(AvailableMemory, IsKnownOnThisHost) {
  const auto found = available_memory();
  ASSERT_TRUE(found);
  EXPECT_GT(found->bytes, 0);
}

}  // namespace
}  // namespace annulus::available_test
