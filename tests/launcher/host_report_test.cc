// Tests the report of a host: to JSON and back, from untrusted JSON, and for the machine on which the test runs.
#include "launcher/hosts/host_report.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/version.h"
#include "launcher/hosts/host_facts.h"

namespace annulus::host_report_test {
namespace {

using nlohmann::json;

json through_text(const HostReport& report) { return json::parse(report_to_json(report).dump()); }

std::string refusal(const json& j) {
  try {
    report_from_json(j, "the report of b");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "";
}

HostReport planted() {
  HostReport report;
  report.name = "b";
  report.listed = "B";
  report.version = kVersion;
  report.root = true;
  report.clock_offset = -0.25;
  report.limits = {65536, 1024, -1};
  report.tmp = {"/tmp/a \"b\"", 5, int64_t{1} << 40, true};
  report.ptrace_scope = 3;
  report.cma = true;
  report.host.machine = Machine::from_synthetic("pack:1 [numa] core:2 pu:1", "b");
  report.driver_gpus = 2;
  report.peer_access = {{true, false}, {false, true}};
  report.environment = {{"NCCL_DEBUG", "INFO"}};
  report.files = {{"a b.toml", "0123"}, {"c", "missing: No such file or directory"}};
  report.unreachable = {"c at 10.0.0.3:5: No route to host"};
  return report;
}

TEST(HostReport, RoundTripsThroughJson) {
  const HostReport report = planted();
  const HostReport back = report_from_json(through_text(report), "b");
  EXPECT_EQ(report_to_json(back), report_to_json(report));
  EXPECT_EQ(back.limits.locked_bytes, 65536);
  EXPECT_EQ(back.tmp.total_bytes, int64_t{1} << 40);
  EXPECT_EQ(back.peer_access, report.peer_access);
  EXPECT_EQ(back.unreachable, report.unreachable);
  EXPECT_EQ(back.host.machine.cores, report.host.machine.cores);
}

TEST(HostReport, NamesInvalidMembers) {
  const std::vector<std::pair<const char*, json>> faults = {
      {"name", 5},
      {"root", "yes"},
      {"clock_offset", "late"},
      {"ptrace_scope", 3e9},
      {"hwloc_gpus", 5000000000},
      {"limits", json::array()},
      {"peer_access", {{true, 1}}},
      {"environment", {{"NCCL_DEBUG", 1}}},
      {"unreachable", {nullptr}},
  };
  for (const auto& [member, value] : faults) {
    json j = through_text(planted());
    j[member] = value;
    EXPECT_NE(refusal(j).find(std::string("the report of b: ") + member), std::string::npos) << refusal(j);
  }
  json limits = through_text(planted());
  limits["limits"]["open_files"] = UINT64_MAX;
  EXPECT_NE(refusal(limits).find("limits.open_files"), std::string::npos);
  EXPECT_NE(refusal(json::array()).find("object"), std::string::npos);
  json nameless = through_text(planted());
  nameless.erase("version");
  EXPECT_NE(refusal(nameless).find("version"), std::string::npos);
}

// The error that users see must be the other version, not a member that has another type there.
TEST(HostReport, ReadsOtherVersionsAsFarAsPossible) {
  json j = through_text(planted());
  j["version"] = "99.0";
  j["limits"] = "none";
  j["host"] = {{"of another", "kind"}};
  j["peer_access"] = 1;
  j.erase("tmp");
  const HostReport report = report_from_json(j, "b");
  EXPECT_EQ(report.version, "99.0");
  EXPECT_EQ(report.name, "b");
  EXPECT_EQ(report.limits.locked_bytes, -1);
  EXPECT_TRUE(report.peer_access.empty());
  EXPECT_TRUE(report.tmp.path.empty());
}

TEST(HostFacts, DescribeThisHost) {
  setenv("NCCL_DEBUG", "WARN", 1);
  setenv("PRTE_MCA_prte_if_include", "eth7", 1);
  setenv("ANNULUS_LAUNCHER", "a secret", 1);
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "facts of a host";
  std::filesystem::create_directories(folder);
  const std::string file = folder / "a; file";
  std::ofstream(file) << "text";
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit planted{777, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &planted);
  const HostReport report = report_of_this_host({{file, "no such file"}, true});
  setrlimit(RLIMIT_NOFILE, &before);

  EXPECT_FALSE(report.name.empty());
  EXPECT_EQ(report.version, kVersion);
  EXPECT_EQ(report.root, geteuid() == 0);
  EXPECT_EQ(report.program, std::filesystem::read_symlink("/proc/self/exe").string());
  EXPECT_EQ(report.program_digest, digest_of_file(report.program));
  // Ranks raise their limit to the hard limit.
  EXPECT_EQ(report.limits.open_files, before.rlim_max == RLIM_INFINITY ? -1 : static_cast<int64_t>(before.rlim_max));
  EXPECT_NE(report.libtorch_path.find("libtorch_cpu.so"), std::string::npos);
  EXPECT_EQ(report.libtorch.find_first_not_of("0123456789.+cudprstv"), std::string::npos) << report.libtorch;
  // "13" for 2.11.0+cu130.
  const size_t variant = report.libtorch.find("+cu");
  if (variant != std::string::npos) {
    EXPECT_EQ(report.torch_cuda, report.libtorch.substr(variant + 3, 2));
  }
  EXPECT_GT(report.tmp.total_bytes, 0);
  EXPECT_TRUE(report.tmp.writable);
  EXPECT_FALSE(report.host.machine.cores.empty());
  EXPECT_FALSE(report.host.interfaces.empty());
  EXPECT_NE(report.boot_id.find("net:["), std::string::npos) << report.boot_id;
  EXPECT_EQ(report.environment.at("NCCL_DEBUG"), "WARN");
  EXPECT_EQ(report.environment.at("PRTE_MCA_prte_if_include"), "eth7");
  EXPECT_EQ(report.environment.count("ANNULUS_LAUNCHER"), 0u);
  EXPECT_EQ(report.files.at(file), digest_of_file(file));
  EXPECT_EQ(report.files.at("no such file"), "missing: No such file or directory");
  // The texts of this system can be written as JSON and read back.
  EXPECT_EQ(report_from_json(through_text(report), "this").name, report.name);
}

TEST(HostFacts, DigestsFollowContent) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "digests";
  std::filesystem::create_directories(folder);
  const std::string a = folder / "a", b = folder / "b", fifo = folder / "fifo";
  std::ofstream(a) << "text";
  std::ofstream(b) << "text";
  EXPECT_EQ(digest_of_file(a), digest_of_file(b));
  std::ofstream(b) << "tex!";
  EXPECT_NE(digest_of_file(a), digest_of_file(b));
  EXPECT_EQ(digest_of_file(folder), "folder");
  unlink(fifo.c_str());
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(digest_of_file(fifo), "no regular file");
  // Of a file above 64 MiB only the length, the beginning and the end count; a difference in between is not found.
  for (const std::string& path : {a, b}) std::filesystem::resize_file(path, size_t{100} << 20);
  std::ofstream(b, std::ios::in) << "text";
  EXPECT_EQ(digest_of_file(a), digest_of_file(b));
  EXPECT_NE(digest_of_file(a).find("104857600 bytes"), std::string::npos);
  std::filesystem::resize_file(b, (size_t{100} << 20) + 1);
  EXPECT_NE(digest_of_file(a), digest_of_file(b));
  std::filesystem::resize_file(b, size_t{100} << 20);
  std::fstream end(b, std::ios::in | std::ios::out);
  end.seekp((100 << 20) - 1);
  end << "x";
  end.close();
  EXPECT_NE(digest_of_file(a), digest_of_file(b));
}

}  // namespace
}  // namespace annulus::host_report_test
