// Tests of runtime/run/run_folder.h: creating, finding and locking run folders.
#include "runtime/run/run_folder.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <vector>

#include "common/error.h"

namespace annulus::run_folder_test {
namespace {

std::string fresh_root(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(path);
  return path;
}

std::pair<ErrorKind, std::string> failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  return {ErrorKind::kInternal, "nothing was raised"};
}

void configure(const RunFolder& run) { std::ofstream(run.config_path()) << "x = 1\n"; }

TEST(RunFolder, EachStartGetsItsOwnFolder) {
  const std::string root = fresh_root("numbers") + "/deep/runs";
  const RunFolder a = RunFolder::create(root, "quick");
  const RunFolder b = RunFolder::create(root, "quick");
  const RunFolder other = RunFolder::create(root, "quick-start");
  EXPECT_EQ(a.path(), root + "/quick-001");
  EXPECT_EQ(b.path(), root + "/quick-002");
  EXPECT_EQ(other.path(), root + "/quick-start-001");
  std::filesystem::create_directories(root + "/quick-041");
  std::filesystem::create_directories(root + "/quick-9999999999999999999999");
  EXPECT_EQ(RunFolder::create(root, "quick").path(), root + "/quick-042");
}

TEST(RunFolder, IsFoundByPathNumberAndName) {
  const std::string root = fresh_root("find");
  {
    for (int i = 0; i < 3; ++i) {
      const RunFolder run = RunFolder::create(root, "quick");
      if (i < 2) configure(run);  // the third died before it wrote its configuration
    }
  }
  EXPECT_EQ(find_run(root, "quick"), root + "/quick-002");
  EXPECT_EQ(find_run(root, "quick-001"), root + "/quick-001");
  EXPECT_EQ(find_run("elsewhere", root + "/quick-001/"), root + "/quick-001");
  const auto [kind, text] = failure([&] { find_run(root, "qick"); });
  EXPECT_EQ(kind, ErrorKind::kInput);
  EXPECT_NE(text.find("did you mean \"quick\"?"), std::string::npos) << text;
  EXPECT_EQ(failure([&] { find_run(root, root + "/quick-003"); }).first, ErrorKind::kInput);
  EXPECT_NE(failure([&] { find_run(root + "/none", "quick"); }).second.find("no runs yet"), std::string::npos);
  for (const auto& call : std::vector<std::function<void()>>{[&] { find_run("elsewhere", root + "/qick-001"); },
                                                             [&] { RunFolder::open(root + "/qick-001"); }}) {
    const auto [none, said] = failure(call);
    EXPECT_EQ(none, ErrorKind::kInput);
    EXPECT_EQ(said, "[run] " + root + "/qick-001: there is no such folder in " + root +
                        "; did you mean \"quick-001\"?; newest runs: quick-003");
  }
  EXPECT_EQ(failure([&] { find_run("elsewhere", "no/where/at/all"); }).second,
            "[run] no/where/at/all: there is no such folder");
  std::filesystem::create_symlink("itself", root + "/itself");
  EXPECT_EQ(failure([&] { find_run(root + "/itself", "quick"); }).first, ErrorKind::kResource);
}

// A run that died before its first checkpoint can neither be resumed nor sampled.
TEST(RunFolder, FindsTheNewestRunWithACheckpoint) {
  namespace fs = std::filesystem;
  const std::string root = fresh_root("checkpoints");
  for (const char* name : {"quick", "quick", "quick", "other", "quick-x"}) configure(RunFolder::create(root, name));
  const auto [kind, text] = failure([&] { find_run(root, ""); });
  EXPECT_EQ(kind, ErrorKind::kInput);
  EXPECT_EQ(text, "[run] no run in " + root + " has a checkpoint; newest runs: other-001, quick-003, quick-x-001");
  EXPECT_EQ(find_run(root, "quick"), root + "/quick-003");
  const auto checkpoint = [&](const std::string& run, int64_t step, int minutes_ago) {
    const std::string folder = root + "/" + run + "/checkpoints/step-0000000" + std::to_string(step);
    fs::create_directories(folder);
    if (minutes_ago < 0) return;
    std::ofstream(folder + "/manifest.json") << "{}";
    fs::last_write_time(folder + "/manifest.json",
                        fs::file_time_type::clock::now() - std::chrono::minutes(minutes_ago));
  };
  checkpoint("quick-001", 1, 50);
  checkpoint("quick-002", 1, 40);
  checkpoint("quick-003", 1, -1);  // a checkpoint without a manifest is incomplete
  checkpoint("other-001", 1, 60);
  EXPECT_EQ(find_run(root, "quick"), root + "/quick-002");
  EXPECT_EQ(find_run(root, ""), root + "/quick-002");
  checkpoint("other-001", 2, 30);
  EXPECT_EQ(find_run(root, ""), root + "/other-001");
  EXPECT_EQ(find_run(root, "quick-003"), root + "/quick-003") << "the run was named in full";
  // A folder that is not a run is reported as such, and a renamed run is listed.
  fs::rename(root + "/other-001", root + "/renamed");
  fs::remove(root + "/quick-003/config.toml");
  EXPECT_EQ(failure([&] { find_run(root, "quick-003"); }).second,
            "[run] " + root + "/quick-003: this is not a run folder, because it has no config.toml");
  EXPECT_NE(failure([&] { find_run(root, "elsewhere"); }).second.find("renamed"), std::string::npos);
  EXPECT_EQ(find_run(root, "renamed"), root + "/renamed");
}

TEST(RunFolder, IsLockedByOneLiveProcess) {
  const std::string root = fresh_root("busy");
  std::optional<RunFolder> run(RunFolder::create(root, "quick"));
  configure(*run);
  const auto [kind, text] = failure([&] { RunFolder::open(root + "/quick-001"); });
  EXPECT_EQ(kind, ErrorKind::kBusy);
  EXPECT_NE(text.find("process " + std::to_string(::getpid()) + " on host "), std::string::npos) << text;
  run.reset();
  EXPECT_EQ(RunFolder::open(root + "/quick-001").path(), root + "/quick-001");
  EXPECT_EQ(failure([&] { RunFolder::open(root); }).first, ErrorKind::kInput);
}

TEST(RunFolder, IsUnlockedWhenItsOwnerWasKilled) {
  const std::string root = fresh_root("killed");
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RunFolder run = RunFolder::create(root, "quick");
    configure(run);
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char c;
  ASSERT_EQ(::read(ready[0], &c, 1), 1);
  const auto [kind, text] = failure([&] { RunFolder::open(root + "/quick-001"); });
  EXPECT_EQ(kind, ErrorKind::kBusy);
  EXPECT_NE(text.find("process " + std::to_string(child)), std::string::npos) << text;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(RunFolder::open(root + "/quick-001"));
}

TEST(RunFolder, ErrorNamesTheRootThatCannotBeUsed) {
  const std::string root = fresh_root("file");
  std::ofstream(root) << "a file";
  const auto [kind, text] = failure([&] { RunFolder::create(root, "quick"); });
  EXPECT_EQ(kind, ErrorKind::kResource);
  EXPECT_NE(text.find(root), std::string::npos) << text;
}

}  // namespace
}  // namespace annulus::run_folder_test
