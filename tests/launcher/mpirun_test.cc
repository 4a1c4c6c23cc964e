// Tests the mpirun command for both supported major versions of Open MPI, and how words are quoted for a shell.
#include "launcher/hosts/mpirun.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/mpirun_process.h"

namespace annulus::mpirun_test {
namespace {

bool has(const std::vector<std::string>& words, const std::vector<std::string>& part) {
  return std::search(words.begin(), words.end(), part.begin(), part.end()) != words.end();
}

MpirunRequest request() {
  MpirunRequest r;
  r.ranks = 4;
  r.session_dir = "/dev/shm/x";
  r.forward = {"ANNULUS_WORLD_SIZE"};
  r.extra = {"--tag-output"};
  r.program = {"/opt/annulus", "train", "a b.toml"};
  return r;
}

TEST(Mpirun, ReadsVersions) {
  const Mpirun four = parse_mpirun_version("mpirun", "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n");
  EXPECT_EQ(four.version, "4.1.4");
  EXPECT_EQ(four.major, 4);
  EXPECT_EQ(four.minor, 1);
  EXPECT_EQ(parse_mpirun_version("mpirun", "mpirun (Open MPI) 5.0.3").major, 5);
  // A wrapper or the dynamic linker may print lines before it.
  const std::string warning = "ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded: ignored.\n";
  EXPECT_EQ(parse_mpirun_version("mpirun", warning + warning + "mpirun.real (Open MPI) 4.1.6\n").version, "4.1.6");
  for (const char* other : {"", "HYDRA build details:\n", "mpirun (Open MPI) 3.1.6", "mpirun (Open MPI) x"}) {
    EXPECT_THROW(parse_mpirun_version("mpirun", other), Error) << other;
  }
}

TEST(Mpirun, CommandForVersion4) {
  MpirunRequest r = request();
  r.oversubscribe = true;
  r.as_root = true;
  const auto words = mpirun_command({"/usr/bin/mpirun", "4.1.4", 4, 1}, r);
  EXPECT_EQ(words.front(), "/usr/bin/mpirun");
  EXPECT_TRUE(has(words, {"-np", "4", "--bind-to", "none"}));
  EXPECT_TRUE(has(words, {"--allow-run-as-root"}));
  EXPECT_TRUE(has(words, {"--oversubscribe"}));
  EXPECT_TRUE(has(words, {"--mca", "orte_local_tmpdir_base", "/dev/shm/x"}));
  EXPECT_TRUE(has(words, {"--mca", "oob_tcp_keepalive_time", "5"}));
  EXPECT_TRUE(has(words, {"-x", "ANNULUS_WORLD_SIZE", "--tag-output", "/opt/annulus", "train", "a b.toml"}));
  EXPECT_EQ(words.back(), "a b.toml");
}

TEST(Mpirun, CommandForVersion5) {
  MpirunRequest r = request();
  r.oversubscribe = true;
  const auto words = mpirun_command({"/usr/bin/mpirun", "5.0.3", 5, 0}, r);
  EXPECT_TRUE(has(words, {"--map-by", ":OVERSUBSCRIBE"}));
  EXPECT_TRUE(has(words, {"--prtemca", "prte_local_tmpdir_base", "/dev/shm/x"}));
  EXPECT_TRUE(has(words, {"--prtemca", "oob_tcp_keepalive_time", "5"}));
  EXPECT_FALSE(has(words, {"--allow-run-as-root"}));
  for (const std::string& word : words) EXPECT_EQ(word.find("vader"), std::string::npos) << word;
}

TEST(Mpirun, PassesInterfacesToDaemons) {
  MpirunRequest r = request();
  r.interfaces = {"eth0", "ib0"};
  EXPECT_TRUE(has(mpirun_command({"/usr/bin/mpirun", "4.1.4", 4, 1}, r), {"--mca", "oob_tcp_if_include", "eth0,ib0"}));
  EXPECT_TRUE(has(mpirun_command({"/usr/bin/mpirun", "5.0.3", 5, 0}, r), {"--prtemca", "prte_if_include", "eth0,ib0"}));
  for (const std::string& word : mpirun_command({"/usr/bin/mpirun", "4.1.4", 4, 1}, request())) {
    EXPECT_EQ(word.find("if_include"), std::string::npos) << word;
  }
}

TEST(Mpirun, QuotesAndSplitsAsAShellDoes) {
  const std::vector<std::string> words = {"plain-1.toml", "two words", "it's", "", "{ kind = \"causal\" }", "$HOME"};
  EXPECT_EQ(shell_quote(words), "plain-1.toml 'two words' 'it'\\''s' '' '{ kind = \"causal\" }' '$HOME'");
  EXPECT_EQ(shell_split(shell_quote(words), "test"), words);
  for (const char* bad : {"'open", "a | b", "$(ls)", "`ls`"}) EXPECT_THROW(shell_split(bad, "test"), Error) << bad;
}

TEST(Mpirun, FindsHostsInOptionsAndVariables) {
  unsetenv("OMPI_MCA_orte_default_hostfile");
  const auto by = [](const char* words) { return hosts_named_by(shell_split(words, "test")); };
  EXPECT_EQ(by("--hostfile hosts"), "--hostfile");
  EXPECT_EQ(by("-x A -H a,b"), "-H");
  EXPECT_EQ(by("--host=a:4,b:4"), "--host");
  EXPECT_EQ(by("-machinefile m"), "-machinefile");
  EXPECT_EQ(by("--mca orte_default_hostfile m"), "orte_default_hostfile");
  EXPECT_EQ(by(""), "");
  EXPECT_EQ(by("-x HOSTFILE --bind-to none --mca plm_rsh_agent ssh --report-bindings"), "");
  setenv("OMPI_MCA_orte_default_hostfile", "f", 1);
  EXPECT_EQ(by(""), "OMPI_MCA_orte_default_hostfile");
  unsetenv("OMPI_MCA_orte_default_hostfile");
}

TEST(Mpirun, ForgetsDefaultHostfiles) {
  for (const char* name : {"OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"}) setenv(name, "f", 1);
  EXPECT_NE(hosts_named_by({}), "");
  forget_default_hosts();
  EXPECT_EQ(hosts_named_by({}), "");
}

// Otherwise a child process that asks for a password (ssh) would wait for an answer on the launcher's terminal.
TEST(Mpirun, RunsWithoutATerminal) {
  sigset_t none;
  sigemptyset(&none);
  MpirunProcess process({"/bin/sh", "-c", "cut -d' ' -f6 /proc/self/stat; echo $$"}, none);
  while (process.running()) {
    std::vector<pollfd> fds;
    process.watch(fds);
    EXPECT_GT(poll(fds.data(), fds.size(), 30000), 0);
    process.read();
  }
  process.read();
  const std::vector<std::string> lines = split(process.text(), '\n');
  EXPECT_EQ(lines.at(0), lines.at(1)) << "a session of its own";
}

TEST(Mpirun, ShieldsDaemonsFromSlurmSignals) {
  MpirunRequest r = request();
  r.shield_daemons = true;
  EXPECT_TRUE(
      has(mpirun_command({"mpirun", "4.1.4", 4, 1}, r), {"orte_launch_agent", "env --block-signal=TERM orted"}));
  EXPECT_TRUE(
      has(mpirun_command({"mpirun", "5.0.3", 5, 0}, r), {"prte_launch_agent", "env --block-signal=TERM prted"}));
  unsetenv("SLURM_JOB_ID");
  EXPECT_FALSE(daemons_need_shield());
}

// Open MPI would cut the names at their first dot.
TEST(Mpirun, KeepsNamesWithDots) {
  unsetenv("SLURM_JOB_ID");
  unsetenv("SLURM_JOB_NODELIST");
  MpirunRequest r = request();
  r.hosts = {{"a", 1}, {"b.x.example", 2}};
  const auto four = [&] { return mpirun_command({"mpirun", "4.1.4", 4, 1}, r); };
  EXPECT_TRUE(has(four(), {"--mca", "orte_keep_fqdn_hostnames", "1", "--host", "a,b.x.example,b.x.example"}));
  EXPECT_TRUE(has(mpirun_command({"mpirun", "5.0.3", 5, 0}, r), {"--prtemca", "prte_keep_fqdn_hostnames", "1"}));
  // mpirun's own host goes by its own name, which it recognizes.
  std::array<char, 256> own{};
  gethostname(own.data(), own.size() - 1);
  r.hosts.push_back({"127.0.0.1", 1});
  EXPECT_TRUE(has(four(), {"--host", std::string("a,b.x.example,b.x.example,") + own.data()}));
  // Slurm's names are those of its allocation, "b" here; mpirun cuts the list's to compare them.
  setenv("SLURM_JOB_ID", "7", 1);
  setenv("SLURM_JOB_NODELIST", "a,b", 1);
  EXPECT_FALSE(has(four(), {"orte_keep_fqdn_hostnames"}));
  setenv("SLURM_JOB_NODELIST", "a.x.example,b.x.example", 1);
  EXPECT_TRUE(has(four(), {"orte_keep_fqdn_hostnames", "1", "--host", "a,b.x.example,b.x.example,127.0.0.1"}));
  unsetenv("SLURM_JOB_ID");
  unsetenv("SLURM_JOB_NODELIST");
  r.hosts = {{"a", 1}, {"10.0.0.2", 2}};
  EXPECT_FALSE(has(four(), {"orte_keep_fqdn_hostnames"})) << "an address is not cut";
}

// Linux limits one argument to 128 KiB.
TEST(Mpirun, WritesHostfileForLongHostLists) {
  MpirunRequest r = request();
  r.hosts = {{"node0001", 14000}, {"node0002", 2}};
  EXPECT_FALSE(need_hostfile(r.hosts));
  r.hosts = {{"node0002", 1}, {"node0001", 15000}, {"127.0.0.1", 1}};
  ASSERT_TRUE(need_hostfile(r.hosts));
  r.hostfile = ::testing::TempDir() + "/hosts";
  write_hostfile(r.hostfile, r.hosts);
  std::ifstream file(r.hostfile);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 15002U);
  EXPECT_EQ(lines[0], "node0002");
  EXPECT_EQ(lines[15000], "node0001");
  std::array<char, 256> own{};
  gethostname(own.data(), own.size() - 1);
  EXPECT_EQ(lines.back(), own.data()) << "in a host file, mpirun does not know its own host by an address";
  const std::vector<std::string> command = mpirun_command({"mpirun", "4.1.4", 4, 1}, r);
  EXPECT_TRUE(has(command, {"--map-by", "seq", "--hostfile", r.hostfile}));
  for (const std::string& word : command) EXPECT_LT(word.size(), 1000U);
  EXPECT_THROW(write_hostfile("/no such folder/hosts", r.hosts), Error);
}

TEST(Mpirun, ListsHostsInRankOrder) {
  MpirunRequest r = request();
  r.hosts = {{"b", 1}, {"a", 3}};
  r.oversubscribe = true;
  const std::vector<std::string> four = mpirun_command({"mpirun", "4.1.4", 4, 1}, r);
  EXPECT_TRUE(has(four, {"--map-by", "seq", "--host", "b,a,a,a"}));
  EXPECT_TRUE(has(four, {"--oversubscribe"}));
  EXPECT_TRUE(
      has(mpirun_command({"mpirun", "5.0.3", 5, 0}, r), {"--map-by", "seq:OVERSUBSCRIBE", "--host", "b,a,a,a"}));
}

constexpr const char* kNoDaemon = R"(
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
  one or more nodes. Please check your PATH and LD_LIBRARY_PATH
--------------------------------------------------------------------------
)";

TEST(MpirunComplaint, PreferShellErrorsToMpirunText) {
  const std::string frame = std::string(74, '-');
  EXPECT_EQ(mpirun_complaint("ssh: Could not resolve hostname b: Name or service not known\r\n" + frame + kNoDaemon),
            "ssh: Could not resolve hostname b: Name or service not known");
  EXPECT_EQ(mpirun_complaint(frame + kNoDaemon), "ORTE was unable to reliably start one or more daemons.");
  EXPECT_EQ(mpirun_complaint(frame + R"(
mpirun was unable to launch the specified application as it could not access
or execute an executable:

Executable: /opt/annulus/bin/annulus
Node: Host2

while attempting to start process rank 1.
)" + frame + "\n"),
            "mpirun was unable to launch the specified application as it could not access or execute an executable: "
            "Executable: /opt/annulus/bin/annulus Node: Host2 while attempting to start process rank 1.");
  EXPECT_EQ(mpirun_complaint(""), "");
}

TEST(MpirunComplaint, QuoteWarningsOnlyWithoutErrors) {
  const std::string frame = std::string(74, '-');
  const std::string group =
      "[host1:00249] plm:rsh: Warning: setpgid(255,255) failed in parent with errno=Permission denied(13)";
  const std::string added = "Warning: Permanently added 'host3' (ED25519) to the list of known hosts.";
  EXPECT_EQ(mpirun_complaint(group + "\n" + added + "\nbash: annulus: No such file or directory\n" + frame + kNoDaemon),
            "bash: annulus: No such file or directory");
  EXPECT_EQ(mpirun_complaint(group + "\n" + frame + kNoDaemon),
            "ORTE was unable to reliably start one or more daemons.");
  EXPECT_EQ(mpirun_complaint(added), added);
}

}  // namespace
}  // namespace annulus::mpirun_test
