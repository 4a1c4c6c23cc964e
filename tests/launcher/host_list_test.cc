// Tests the list of a job's hosts, from an option, a file or Slurm's variables, and the number of ranks on each host.
#include "launcher/hosts/host_list.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>

#include "common/error.h"

namespace annulus::host_list_test {
namespace {

using Hosts = std::vector<HostSlots>;

// Returns the exit code of the error that `call` throws, and its message.
template <typename Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::to_string(error.exit_code()) + " " + error.what();
  }
  return "nothing was refused";
}

std::string file_of(const std::string& text) {
  const std::string path = ::testing::TempDir() + "/hosts; of \"a\" job";
  std::ofstream(path) << text;
  return path;
}

TEST(HostList, ParsesNamesAndSlots) {
  EXPECT_EQ(parse_hosts("a:8,Node-2.site,10.0.0.3:4,under_score:1", "--hosts").hosts,
            (Hosts{{"a", 8}, {"Node-2.site", 0}, {"10.0.0.3", 4}, {"under_score", 1}}));
  EXPECT_EQ(parse_hosts("a", "--hosts").source, "--hosts");
}

TEST(HostList, RefusesInvalidNamesAndSlots) {
  for (const char* name : {"", "a,,b", "-oProxyCommand=x", "a;b", "a b", "$(reboot)", "a'", "a\"b", "a|b",
                           "h\xc3\xa4usern", "a/b", "a`b`", "a\nb", "a[1-3]"}) {
    const std::string text = refusal([&] { parse_hosts(name, "--hosts"); });
    EXPECT_TRUE(text.starts_with("2 [launcher] --hosts: \"")) << text;
    EXPECT_NE(text.find("is not the name of a host"), std::string::npos) << text;
  }
  for (const char* slots : {"a:", "a:0", "a:-1", "a:x", "a:8x", "a:99999999"}) {
    EXPECT_NE(refusal([&] { parse_hosts(slots, "--hosts"); }).find("host a has the slots \""), std::string::npos)
        << slots;
  }
  EXPECT_NE(refusal([] { parse_hosts("a:2,b,A", "--hosts"); }).find("host A is named twice, as a before"),
            std::string::npos);
  EXPECT_NE(refusal([] { parse_hosts("a:65536,b,a", "--hosts"); }).find("more than 65536 slots"), std::string::npos);
  for (const char* address : {"fe80::1", "[fe80::1]:4", "b,::1"}) {
    EXPECT_NE(refusal([&] { parse_hosts(address, "--hosts"); }).find("IPv6 address"), std::string::npos) << address;
  }
}

TEST(HostList, ReadsBothHostfileFormats) {
  const std::string path =
      file_of("# of ours\n\nn1 slots=8 max_slots=16\n  n2:4\t# the small one\nn3\r\nn4 max-slots=2 slots=1\n");
  const HostList list = read_hostfile(path);
  EXPECT_EQ(list.hosts, (Hosts{{"n1", 8}, {"n2", 4}, {"n3", 0}, {"n4", 1}}));
  EXPECT_EQ(list.source, "--hostfile " + path);
  const auto refused = [](const std::string& text) { return refusal([&] { read_hostfile(file_of(text)); }); };
  EXPECT_NE(refused("n1\nn2 slots=\n").find("line 2: host n2 has the slots \"\""), std::string::npos);
  EXPECT_NE(refused("n1 8\n").find("line 1: \"8\" is not understood"), std::string::npos);
  EXPECT_NE(refused("n1\n\nN1\n").find("line 3: host N1 is named twice"), std::string::npos);
  for (const char* line : {"n1 slots", "n1 slots = 8 =", "n1 = 8", "n1 slots == 8", "n1 user = me", "n1 max_slots ="}) {
    EXPECT_TRUE(refused(line).starts_with("3 ")) << line;
  }
  EXPECT_NE(refused("; rm -r /\n").find("line 1: \""), std::string::npos);
  EXPECT_NE(refused("# nothing\n").find("no host is named"), std::string::npos);
  EXPECT_TRUE(refused("-x\n").starts_with("3 ")) << refused("-x\n");
  EXPECT_TRUE(refusal([] { read_hostfile("/nowhere/hosts"); }).starts_with("2 "));
}

TEST(HostList, ReadsHostfilesAsOpenMpiDoes) {
  const auto hosts = [](const std::string& text) { return read_hostfile(file_of(text)).hosts; };
  EXPECT_EQ(hosts("n1 slots = 8\nn2 slots= 4 max_slots =5\n"), (Hosts{{"n1", 8}, {"n2", 4}}));
  EXPECT_EQ(hosts("n1 cpu=2\nn2 count=3\nn3 max-cpu=4\nn4.x.example slots=1\n"),
            (Hosts{{"n1", 2}, {"n2", 3}, {"n3", 4}, {"n4.x.example", 1}}));
  // The file of a PBS job has a line for each slot.
  EXPECT_EQ(hosts("n1\nn1\nn2\nn1\nn3\nn3\n"), (Hosts{{"n1", 3}, {"n2", 1}, {"n3", 2}}));
  EXPECT_EQ(hosts("n1 slots=4\nn2\nn1 slots=2\nn1\n"), (Hosts{{"n1", 7}, {"n2", 1}}));
  EXPECT_EQ(hosts("n1\nn2\n"), (Hosts{{"n1", 0}, {"n2", 0}})) << "no host is repeated: any number of ranks";
  EXPECT_EQ(parse_hosts("a,b:2,a,a", "--hosts").hosts, (Hosts{{"a", 3}, {"b", 2}}));
}

class Slurm : public ::testing::Test {
 protected:
  Slurm() { clear(); }
  ~Slurm() override { clear(); }
  static void clear() {
    for (const char* name :
         {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"}) {
      unsetenv(name);
    }
  }
  static void allocate(const char* nodes, const char* tasks, const char* asked) {
    setenv("SLURM_JOB_ID", "7", 1);
    setenv("SLURM_JOB_NODELIST", nodes, 1);
    setenv("SLURM_TASKS_PER_NODE", tasks, 1);
    setenv("SLURM_NTASKS", asked, 1);
  }
};

TEST_F(Slurm, ReturnsNothingWithoutAllocation) { EXPECT_EQ(hosts_of_slurm(), std::nullopt); }

TEST_F(Slurm, ExpandsNodesAndTasks) {
  allocate("n[1-3,07],login,r[1-2]c[08-10]", "2(x3),1,4(x7)", "");
  EXPECT_EQ(hosts_of_slurm()->hosts.front(), (HostSlots{"n1", 0})) << "no number of tasks was requested";
  setenv("SLURM_NTASKS", "35", 1);
  EXPECT_EQ(hosts_of_slurm()->hosts, (Hosts{{"n1", 2},
                                            {"n2", 2},
                                            {"n3", 2},
                                            {"n07", 1},
                                            {"login", 4},
                                            {"r1c08", 4},
                                            {"r1c09", 4},
                                            {"r1c10", 4},
                                            {"r2c08", 4},
                                            {"r2c09", 4},
                                            {"r2c10", 4}}));
  allocate("n[098-101]", "1(x4)", "4");
  EXPECT_EQ(hosts_of_slurm()->hosts, (Hosts{{"n098", 1}, {"n099", 1}, {"n100", 1}, {"n101", 1}}));
}

TEST_F(Slurm, AsksForMoreTasksWhenRanksDoNotFit) {
  allocate("n1", "1", "1");
  const HostList list = *hosts_of_slurm();
  EXPECT_NE(refusal([&] {
              ranks_of_hosts(list, 4);
            }).find("4 ranks do not fit into the 1 slot of the hosts; ask Slurm for more tasks"),
            std::string::npos);
}

TEST_F(Slurm, RefusesMalformedVariables) {
  for (const char* nodes : {"n[1-", "n1]", "n[a-b]", "n[1-2-3]", "n[0-99999999]", "n;reboot", "n[1],n1"}) {
    allocate(nodes, "2", "");
    EXPECT_TRUE(refusal(hosts_of_slurm).starts_with("2 [launcher] SLURM_JOB_NODELIST")) << nodes;
  }
  for (const char* tasks : {"2(x", "2(x0)", "x", "2(x2)3", "2,2,2"}) {
    allocate("n[1-2]", tasks, "4");
    EXPECT_TRUE(refusal(hosts_of_slurm).starts_with("2 [")) << tasks;
    EXPECT_NE(refusal(hosts_of_slurm).find("SLURM_TASKS_PER_NODE"), std::string::npos) << tasks;
  }
}

TEST(RanksOfHosts, SpreadsRanksAsEvenlyAsSlotsAllow) {
  const auto ranks = [](const char* hosts, int n) { return ranks_of_hosts(parse_hosts(hosts, "--hosts"), n); };
  EXPECT_EQ(ranks("a:8,b:8,c:4", 0), (std::vector<int>{8, 8, 4}));
  EXPECT_EQ(ranks("a:8,b:8,c:4", 12), (std::vector<int>{4, 4, 4}));
  EXPECT_EQ(ranks("a:8,b:8,c:4", 16), (std::vector<int>{6, 6, 4}));
  EXPECT_EQ(ranks("a:8,b:8,c:4", 15), (std::vector<int>{6, 5, 4}));
  EXPECT_EQ(ranks("a,b,c", 8), (std::vector<int>{3, 3, 2}));
  EXPECT_EQ(ranks("a,b,c", 2), (std::vector<int>{1, 1, 0}));
  EXPECT_EQ(ranks("a:1,b", 7), (std::vector<int>{1, 6}));
  EXPECT_NE(refusal([&] { ranks("a:2,b", 0); }).find("the number of ranks on host b is not given"), std::string::npos);
  EXPECT_NE(refusal([&] { ranks("a:2,b:2", 5); }).find("5 ranks do not fit into the 4 slots"), std::string::npos);
}

TEST(RanksOfHosts, BalancesRandomLists) {
  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    HostList list;
    int slots = 0;
    const int hosts = 1 + static_cast<int>(random() % 9);
    for (int h = 0; h < hosts; ++h) {
      list.hosts.push_back({"n" + std::to_string(h), 1 + static_cast<int>(random() % 12)});
      slots += list.hosts.back().slots;
    }
    const int ranks = 1 + static_cast<int>(random() % static_cast<unsigned>(slots));
    const std::vector<int> given = ranks_of_hosts(list, ranks);
    EXPECT_EQ(std::accumulate(given.begin(), given.end(), 0), ranks);
    // No host with a free slot has two ranks fewer than another host.
    for (size_t a = 0; a < given.size(); ++a) {
      EXPECT_LE(given[a], list.hosts[a].slots);
      for (size_t b = 0; b < given.size(); ++b) {
        EXPECT_TRUE(given[a] == list.hosts[a].slots || given[b] <= given[a] + 1) << given[a] << " and " << given[b];
      }
    }
  }
}

TEST(ThisHost, IsRecognizedByNameAndAddress) {
  std::array<char, 256> own{};
  ASSERT_EQ(gethostname(own.data(), own.size() - 1), 0);
  EXPECT_TRUE(is_this_host(own.data()));
  EXPECT_TRUE(is_this_host("LocalHost"));
  EXPECT_TRUE(is_this_host("127.0.0.1"));
  EXPECT_FALSE(is_this_host("no-such-host"));
  EXPECT_FALSE(is_this_host("203.0.113.77"));
  const std::string name(own.data());
  // A name that no resolver knows (RFC 6761), with and without the domain.
  EXPECT_TRUE(is_this_host(name.find('.') == std::string::npos ? name + ".invalid" : name.substr(0, name.find('.'))));
  EXPECT_FALSE(is_this_host(name + "x.invalid"));
}

TEST(FullName, HasADomain) {
  EXPECT_TRUE(is_full_name("node1.cluster.example"));
  EXPECT_FALSE(is_full_name("node1"));
  EXPECT_FALSE(is_full_name("10.0.0.1"));
}

}  // namespace
}  // namespace annulus::host_list_test
