// Tests of saves by several ranks (runtime/run/checkpoint_save.h), while training waits and while it goes on, in which
// one rank fails or dies, or the power fails, at any file operation: the rank is named, and the older checkpoints stay
// intact.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "runtime/run/checkpoint_files.h"
#include "tests/common/faulty_files.h"
#include "tests/runtime/run/cut_checkpoints.h"

namespace annulus::checkpoint_faults_test {
namespace {

namespace fs = std::filesystem;
using Fault = FaultyFiles::Fault;

// The errors that the ranks of a save throw, in rank order; empty for a rank that throws none.
std::vector<std::string> failures(const std::string& run, bool behind, int ranks,
                                  const std::vector<FileSystem*>& files) {
  std::vector<std::string> raised(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& world) {
    const auto rank = static_cast<size_t>(world.rank());
    CheckpointStore store(run, 2, *files[rank], kBlock);
    try {
      save_by(behind, world, store, 3, 1);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource) << error.what();
      raised[rank] = error.what();
    }
  });
  return raised;
}

void expect_old_or_new(const std::string& run, bool new_alone) {
  std::vector<std::string> skipped;
  const int64_t found = read_back(run, 2, 3, &skipped);
  EXPECT_TRUE(found == 3 || (found == 2 && !new_alone)) << found;
  EXPECT_TRUE(skipped.empty()) << skipped[0];
  for (const std::string& name : names(run)) {
    if (name.starts_with("step-")) {
      EXPECT_NO_THROW(CheckpointReader(run + "/checkpoints/" + name, read_manifest(run + "/checkpoints/" + name))
                          .check(CheckpointPart::kAll, 0, 1));
    }
  }
  // The next job saves, and cleans up. A disk that does not sync makes the sweeps faster.
  FaultyFiles good(Fault::kFull, -1);
  saved(run, 4, 2, 1, 2, good);
  EXPECT_EQ(read_back(run, 1), 4);
  for (const std::string& name : names(run)) EXPECT_FALSE(name.starts_with(".tmp-")) << name;
}

std::string with_two(const std::string& name) {
  const std::string run = fresh_run(name);
  saved(run, 1, 3, 1, 2);
  saved(run, 2, 3, 1, 2);
  return run;
}

std::string again(const std::string& before) {
  const std::string run = ::testing::TempDir() + "/swept";
  fs::remove_all(run);
  fs::copy(before, run, fs::copy_options::recursive);
  return run;
}

// The disk is full at any operation of any rank.
void fill_the_disk(bool behind) {
  const std::string before = with_two("failing");
  for (int failing = 0; failing < 3; ++failing) {
    bool failed = true;
    int at = 0;
    for (; failed; ++at) {
      ASSERT_LT(at, 1000);
      SCOPED_TRACE("operation " + std::to_string(at) + " of rank " + std::to_string(failing));
      const std::string run = again(before);
      FaultyFiles bad(Fault::kFull, at), good(Fault::kFull, -1);
      std::vector<FileSystem*> files(3, &good);
      files[static_cast<size_t>(failing)] = &bad;
      const std::vector<std::string> raised = failures(run, behind, 3, files);
      failed = bad.failed();
      for (const std::string& error : raised) {
        EXPECT_EQ(error, raised[0]);
        EXPECT_EQ(error.find("on rank " + std::to_string(failing) + ": cannot write ") != std::string::npos, failed)
            << error;
      }
      const std::vector<std::string> left = names(run);
      const bool published = std::count(left.begin(), left.end(), "step-00000003") > 0;
      EXPECT_TRUE(published || left == (std::vector<std::string>{"step-00000001", "step-00000002"}))
          << "of a save that failed and was not published, nothing is left";
      expect_old_or_new(run, !failed);
    }
    EXPECT_GT(at, 10);  // two files, with a write for each block
  }
}

TEST(CheckpointFaults, NamesTheFailingRankAndKeepsOlderCheckpoints) {
  fill_the_disk(/*behind=*/false);
  fill_the_disk(/*behind=*/true);
}

// A rank dies at any of its operations, without telling the others and without cleaning up.
void let_ranks_die(bool behind) {
  const std::string before = with_two("dying");
  for (int dying = 0; dying < 3; ++dying) {
    bool died = true;
    for (int at = 0; died; ++at) {
      ASSERT_LT(at, 1000);
      SCOPED_TRACE("operation " + std::to_string(at) + " of rank " + std::to_string(dying));
      const std::string run = again(before);
      FaultyFiles bad(Fault::kDeath, at), good(Fault::kFull, -1);
      std::promise<bool> ended;  // true: by its death
      std::promise<void> others_have_ended;
      std::shared_future<void> released = others_have_ended.get_future().share();
      std::atomic<bool> dead = false;
      bad.on_death = [&] {
        dead = true;
        ended.set_value(true);
        released.wait();  // nothing of this rank happens any more while the others run
      };
      std::thread saving;
      std::atomic<int> told = 0;
      const auto job = [&] {
        run_ranks(3, [&](Communicator& world) {
          if (world.rank() != dying) {
            CheckpointStore store(run, 2, good, kBlock);
            try {
              save_by(behind, world, store, 3, 1);
            } catch (const Error& error) {
              EXPECT_EQ(error.kind(), ErrorKind::kComm) << error.what();
              EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(dying)), std::string::npos)
                  << error.what();
              ++told;
            }
            return;
          }
          saving = std::thread([&, share = world.shared_from_this()] {
            CheckpointStore store(run, 2, bad, kBlock);
            try {
              save_by(behind, *share, store, 3, 1, [&] {
                if (dead) throw FaultyFiles::Dead();  // the writer has died, and with it the whole rank
              });
              ended.set_value(false);
            } catch (const Error&) {
            } catch (const FaultyFiles::Dead&) {
            }
          });
          if (ended.get_future().get()) throw FaultyFiles::Dead();
        });
      };
      try {
        job();
        died = false;
      } catch (const FaultyFiles::Dead&) {
      }
      others_have_ended.set_value();
      saving.join();
      ASSERT_EQ(bad.failed(), died);
      EXPECT_EQ(told, died ? 2 : 0);
      expect_old_or_new(run, !died);
    }
  }
}

TEST(CheckpointFaults, NamesTheDeadRankAndKeepsOlderCheckpoints) {
  let_ranks_die(/*behind=*/false);
  let_ranks_die(/*behind=*/true);
}

// The power fails for all ranks at once, at any operation and after the last one.
void let_the_power_fail(bool behind) {
  const std::string before = with_two("power");
  bool failed = true;
  for (int at = 0; failed; ++at) {
    ASSERT_LT(at, 1000);
    SCOPED_TRACE("operation " + std::to_string(at));
    const std::string run = again(before);
    FaultyFiles files(Fault::kNames, at);
    std::atomic<int> raised = 0;
    run_ranks(3, [&](Communicator& world) {
      CheckpointStore store(run, 2, files, kBlock);
      try {
        save_by(behind, world, store, 3, 1);
      } catch (const Error&) {
        ++raised;
      }
    });
    failed = files.failed();
    EXPECT_EQ(raised, failed ? 3 : 0);
    if (!failed) files.lose_power();
    expect_old_or_new(run, !failed);
  }
}

TEST(CheckpointFaults, SavedCheckpointsSurvivePowerLoss) {
  let_the_power_fail(/*behind=*/false);
  let_the_power_fail(/*behind=*/true);
}

// A process is killed (kill -9) at any operation of a save while it trains on.
TEST(CheckpointFaults, KilledProcessLeavesTheOldOrTheNewCheckpoint) {
  const std::string before = with_two("killed");
  bool killed = true, seen_old = false, seen_new = false;
  for (int at = 0; killed; ++at) {
    ASSERT_LT(at, 1000);
    SCOPED_TRACE("operation " + std::to_string(at));
    const std::string run = again(before);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      FaultyFiles files(Fault::kDeath, at);
      files.on_death = [] { ::kill(::getpid(), SIGKILL); };
      try {
        const auto self = make_self_communicator();
        CheckpointStore store(run, 2, files, kBlock);
        save_behind(*self, store, 3, 1);
      } catch (...) {
        _exit(1);
      }
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    killed = WIFSIGNALED(status);
    EXPECT_TRUE(killed ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0) << status;
    (read_back(run, 1) == 3 ? seen_new : seen_old) = true;
    expect_old_or_new(run, !killed);
  }
  EXPECT_TRUE(seen_old);
  EXPECT_TRUE(seen_new);
}

}  // namespace
}  // namespace annulus::checkpoint_faults_test
