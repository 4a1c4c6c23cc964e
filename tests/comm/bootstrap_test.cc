// Tests of bootstrap and its parts in one process. integration_tests/comm_* tests jobs of several processes.
#include "comm/bootstrap/bootstrap.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "comm/bootstrap/launch_info.h"
#include "comm/bootstrap/presence.h"
#include "comm/watchdog.h"
#include "common/logging/log_setup.h"

namespace annulus {
namespace {

// Sets variables for one test and unsets all variables that a launcher may have set.
class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMIX_RANK",
                             "PMIX_NAMESPACE",
                             "PMI_SIZE",
                             "PMI_RANK",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "SLURM_PROCID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_NODEID",
                             "SLURM_STEP_TASKS_PER_NODE",
                             "SLURM_JOB_ID",
                             "SLURM_STEP_ID",
                             "ANNULUS_WORLD_SIZE",
                             "ANNULUS_BOOTSTRAP_TIMEOUT",
                             "WORLD_SIZE",
                             "RANK",
                             "LOCAL_RANK",
                             "MV2_COMM_WORLD_SIZE",
                             "MV2_COMM_WORLD_RANK",
                             "MVP_COMM_WORLD_SIZE",
                             "MVP_COMM_WORLD_RANK",
                             "FLUX_JOB_SIZE",
                             "FLUX_TASK_RANK",
                             "JSM_NAMESPACE_SIZE",
                             "JSM_NAMESPACE_RANK",
                             "HOROVOD_SIZE",
                             "HOROVOD_RANK"}) {
      unsetenv(name);
    }
  }
  static void set(const char* name, const char* value) { setenv(name, value, 1); }
  static void expect_refused(const char* variable, const char* value) {
    set(variable, value);
    try {
      launch_info();
      ADD_FAILURE() << value << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(e.what()).find(variable), std::string::npos) << e.what();
    }
  }
};

TEST_F(Environment, WithoutALauncherThereIsOneRank) {
  const LaunchInfo info = launch_info();
  EXPECT_FALSE(info.launched);
  EXPECT_EQ(info.size, 1);
  EXPECT_EQ(info.rank, 0);
}

TEST_F(Environment, ReadsOpenMpi) {
  set("OMPI_COMM_WORLD_SIZE", "8");
  set("OMPI_COMM_WORLD_RANK", "5");
  set("OMPI_COMM_WORLD_LOCAL_RANK", "1");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "4");
  const LaunchInfo info = launch_info();
  EXPECT_TRUE(info.launched);
  EXPECT_EQ(info.launcher, "Open MPI");
  EXPECT_EQ(info.size, 8);
  EXPECT_EQ(info.rank, 5);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_size, 4);
}

TEST_F(Environment, ReadsSlurmStepsButNotBatchScripts) {
  set("SLURM_JOB_ID", "12");
  set("SLURM_PROCID", "0");
  EXPECT_FALSE(launch_info().launched);
  set("SLURM_STEP_NUM_TASKS", "4");
  set("SLURM_PROCID", "3");
  const LaunchInfo info = launch_info();
  EXPECT_TRUE(info.launched);
  EXPECT_EQ(info.size, 4);
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.local_size, -1) << "Slurm did not set it";
}

TEST_F(Environment, ReadsTasksPerNodeOfASlurmStep) {
  set("SLURM_STEP_NUM_TASKS", "7");
  set("SLURM_PROCID", "6");
  set("SLURM_STEP_TASKS_PER_NODE", "2(x3),1");
  for (const auto& [node, tasks] : {std::pair{"0", 2}, {"2", 2}, {"3", 1}, {"4", -1}}) {
    set("SLURM_NODEID", node);
    EXPECT_EQ(launch_info().local_size, tasks) << node;
  }
  for (const char* value : {"two", "2(x3", "2(x)", "0", "2,", "2(x1000000)", "-1"}) {
    expect_refused("SLURM_STEP_TASKS_PER_NODE", value);
  }
}

TEST_F(Environment, RefusesInvalidNumbers) {
  for (const char* value : {"four", "-1", "4 ", "1e99", "nan", "4x"}) {
    expect_refused("OMPI_COMM_WORLD_SIZE", value);
  }
}

TEST_F(Environment, OneRankNeverStartsMpi) {
  Job job = bootstrap({.fingerprint = {{"version", "0.1.0"}}});
  EXPECT_EQ(job.size, 1);
  EXPECT_EQ(job.rank, 0);
  EXPECT_FALSE(job.runtime);
  EXPECT_EQ(job.world->size(), 1);
  job.require_agreement({{"shape", "[1]"}}, {"step", 1});
  int started = 0;
  MPI_Initialized(&started);
  EXPECT_EQ(started, 0);
}

// The remedy must start the program that shows the error: annulus launch can start only annulus.
TEST_F(Environment, RanksWithoutALauncherAreAnError) {
  set("ANNULUS_WORLD_SIZE", "4");
  const auto refused = [](const BootstrapOptions& options, const std::string& remedy) {
    try {
      bootstrap(options);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kComm);
      EXPECT_NE(std::string(e.what()).find("start the ranks with `" + remedy + " ...`"), std::string::npos) << e.what();
    }
  };
  refused({}, "mpirun -n 4");
  refused({.start = "annulus launch -n"}, "annulus launch -n 4");
}

// Otherwise each process of such a launcher would compute alone what was meant for all of them.
TEST_F(Environment, MoreProcessesThanRanksAreRefused) {
  const auto refused = [](const std::string& words) {
    try {
      bootstrap({});
      ADD_FAILURE() << "no error for " << words;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUnavailable);
      EXPECT_EQ(std::string(e.what()).find("[comm] " + words), 0) << e.what();
      EXPECT_NE(std::string(e.what()).find("mpirun -n 3 "), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).find("annulus launch"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("ANNULUS_WORLD_SIZE=1"), std::string::npos) << e.what();
    }
  };
  struct Launcher {
    const char *name, *size, *rank;
  };
  for (const Launcher& l : {Launcher{"torchrun", "WORLD_SIZE", "RANK"},
                            {"MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
                            {"MVAPICH", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"},
                            {"Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"},
                            {"jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"},
                            {"Horovod", "HOROVOD_SIZE", "HOROVOD_RANK"}}) {
    SetUp();
    set(l.size, "3");
    EXPECT_EQ(bootstrap({}).size, 1) << l.name << ": a size without a rank means nothing";
    set(l.rank, "1");
    refused(l.name);
    for (const char* size : {"1", "three", "3 "}) {
      set(l.size, size);
      EXPECT_EQ(bootstrap({}).size, 1) << l.name << " " << size;
    }
    set(l.size, "3");
    set("ANNULUS_WORLD_SIZE", "1");  // each process runs alone
    EXPECT_EQ(bootstrap({}).size, 1) << l.name;
  }
}

// srun starts a torchrun on each of two hosts, so two processes have rank 0. MPI must not be started for them.
TEST_F(Environment, MoreProcessesThanRanksAreRefusedBelowAnotherLauncher) {
  set("SLURM_STEP_NUM_TASKS", "2");
  set("SLURM_PROCID", "0");
  set("WORLD_SIZE", "4");
  set("RANK", "1");
  try {
    bootstrap({});
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUnavailable);
    EXPECT_NE(std::string(e.what()).find("this process sees 2"), std::string::npos) << e.what();
  }
  set("ANNULUS_WORLD_SIZE", "1");
  EXPECT_EQ(bootstrap({}).size, 1);
  int started = 0;
  MPI_Initialized(&started);
  EXPECT_EQ(started, 0);
}

TEST_F(Environment, RunTogetherReportsErrorsOnOneRankToo) {
  std::string said;
  Job job = bootstrap({.report = [&](const Error& error) { said += error.what(); }});
  try {
    job.run_together({"reading", 0}, [] { throw Error(ErrorKind::kInput, "data", "no file"); });
    ADD_FAILURE() << "no error";
  } catch (const ReportedError& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInput);
    EXPECT_STREQ(e.what(), "[data] no file");
  }
  EXPECT_EQ(said, "[data] no file");
}

TEST(Presence, SeesPresentRanksAndReportClaims) {
  LaunchInfo info;
  info.launched = true;
  info.job = "presence test " + std::to_string(getpid());
  info.size = info.local_size = 4;
  info.rank = 1;
  comm_internal::Presence one(info);
  info.rank = 3;
  auto three = std::make_unique<comm_internal::Presence>(info);
  EXPECT_EQ(one.seen().here, (std::vector<int>{1, 3}));
  EXPECT_TRUE(one.seen().stopped.empty());
  bool fault = false;
  EXPECT_EQ(comm_internal::describe_missing(info, one, "h", &fault), "ranks 0,2 have not come (host h)");
  EXPECT_TRUE(fault);
  EXPECT_FALSE(one.report_claimed());
  EXPECT_TRUE(three->claim_report());
  EXPECT_TRUE(one.report_claimed());
  EXPECT_FALSE(one.claim_report());
  three.reset();
  EXPECT_EQ(one.seen().here, std::vector<int>{1});
  info.local_size = 1;
  EXPECT_EQ(comm_internal::describe_missing(info, one, "h", &fault),
            "nothing is wrong on host h, so ranks of other hosts have not come");
  EXPECT_FALSE(fault);
}

// Once all ranks have come, a rank that is missing has ended.
TEST(Presence, DetectsRanksThatAreGone) {
  LaunchInfo info;
  info.launched = true;
  info.job = "liveness test " + std::to_string(getpid());
  info.size = info.local_size = 2;
  const comm_internal::Presence zero(info);
  info.rank = 1;
  auto one = std::make_unique<comm_internal::Presence>(info);
  info.rank = 0;
  const auto stalled = [&] {
    return comm_internal::describe_stalled(info, zero, "h", [](int rank) { return rank + 10; });
  };
  EXPECT_TRUE(zero.all_live());
  EXPECT_EQ(stalled(), "");
  // Looking repeatedly works, although nobody accepts the connections.
  for (int i = 0; i < 300; ++i) EXPECT_TRUE(zero.all_live());
  one.reset();
  EXPECT_FALSE(zero.all_live());
  EXPECT_EQ(stalled(), "rank 11 is gone (host h)");
  info.size = 3;  // whether ranks of other hosts live cannot be seen
  EXPECT_EQ(stalled(), "");
  info.size = 2;
  info.rank = 1;  // which never announced itself, so nothing is known
  EXPECT_EQ(stalled(), "");
}

TEST(Watchdog, KeepsWaitingWhileThereIsNoReason) {
  std::promise<void> third;
  int asked = 0;
  const comm_internal::Watchdog watchdog(Seconds(0.001), [&]() -> std::optional<std::string> {
    if (++asked == 3) third.set_value();
    return std::nullopt;
  });
  third.get_future().wait();
}

TEST(WatchdogDeathTest, EndsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const comm_internal::Watchdog watchdog(Seconds(0.01), [] { return std::string("stuck in a call"); });
        for (;;) pause();
      },
      ::testing::ExitedWithCode(6), "stuck in a call");
}

TEST(WatchdogDeathTest, LogsARecord) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        set_log_settings({.json = true});
        const comm_internal::Watchdog watchdog(
            Seconds(0.01), [] { return std::string("stuck in a call"); }, 3);
        for (;;) pause();
      },
      ::testing::ExitedWithCode(6),
      R"("level":"error","host":"","rank":3,"module":"comm","message":"stuck in a call")");
}

TEST(Watchdog, DestructionCancelsIt) {
  bool asked = false;
  {
    const comm_internal::Watchdog watchdog(Seconds(1000), [&] {
      asked = true;
      return std::string("never");
    });
  }
  // The watchdog's thread has ended with it, and the process still runs.
  EXPECT_FALSE(asked);
}

}  // namespace
}  // namespace annulus
