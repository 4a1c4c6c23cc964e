// Tests the watch of a host's ranks over real processes: children of this test that stop, sleep, compute and end.
#include "launcher/launch/host_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "common/trace/beat.h"

namespace annulus::host_watch_test {
namespace {

using nlohmann::json;

// Waits until `condition` holds; returns false if it does not in half a minute.
template <typename Condition>
bool comes_true(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// A child that does `work` with its page, and is killed at the end of the test.
class Child {
 public:
  template <typename Work>
  explicit Child(const Work& work) : fd_(memfd_create("page", 0)) {
    EXPECT_EQ(ftruncate(fd_, sizeof(BeatPage)), 0);
    page_ = new (mmap(nullptr, sizeof(BeatPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0)) BeatPage;
    pid_ = fork();
    if (pid_ == 0) {
      set_beat_page(page_);
      work(*page_);
      _exit(0);
    }
    EXPECT_TRUE(comes_true([&] { return page_->mark == BeatPage::kMark; })) << "the child has not begun";
  }
  ~Child() {
    end(SIGKILL);
    munmap(page_, sizeof(BeatPage));
    close(fd_);
  }

  pid_t pid() const { return pid_; }
  int fd() const { return fd_; }
  BeatPage& page() { return *page_; }

  // Sends a signal and waits until it has had its effect.
  void stop() {
    kill(pid_, SIGSTOP);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
    EXPECT_TRUE(WIFSTOPPED(status));
  }
  void end(int signal) {
    if (pid_ <= 0) return;
    kill(pid_, signal);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  int fd_;
  pid_t pid_ = -1;
  BeatPage* page_;
};

[[noreturn]] void wait_for_ever() {
  for (;;) pause();
}

const auto kWaits = [](BeatPage&) { wait_for_ever(); };

std::vector<json> of_kind(const std::vector<json>& news, const char* kind) {
  std::vector<json> found;
  for (const json& one : news) {
    if (one.contains(kind)) found.push_back(one);
  }
  return found;
}

TEST(HostWatch, NamesAStoppedRankAndWhereItStands) {
  Child stops([](BeatPage& page) {
    page.step = 12;
    beat_internal::enter(page, "forward", "", -1, -1, false);
    beat_internal::enter(page, "tiles", "", 3, 2, false);
    wait_for_ever();
  });
  ASSERT_TRUE(comes_true([&] { return stops.page().depth == 2; }));
  Child goes_on(kWaits);
  HostWatch watch(3, getpid());
  watch.add(5, stops.pid(), stops.fd());
  watch.add(6, goes_on.pid(), goes_on.fd());
  EXPECT_TRUE(watch.look(1).empty());
  stops.stop();
  EXPECT_TRUE(watch.look(1).empty());
  EXPECT_TRUE(watch.look(1).empty());
  const std::vector<json> news = watch.look(1.5);
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0]["stuck"], 5);
  EXPECT_EQ(news[0]["text"], "has been stopped (SIGSTOP) for 3.5 s; step 12: forward, tiles (layer 3, hop 2)");
  EXPECT_TRUE(watch.look(10).empty()) << "it is said once";
  EXPECT_FALSE(watch.over());
}

TEST(HostWatch, NamesARankThatStandsStillAndWhatTheKernelSaysOfIt) {
  Child sleeps(kWaits), spins([](BeatPage&) {
    for (volatile bool spins = true; spins;) {
    }
  });
  for (Child* child : {&sleeps, &spins}) child->page().expected = 1;
  HostWatch watch(3, getpid());
  watch.add(0, sleeps.pid(), sleeps.fd());
  watch.add(1, spins.pid(), spins.fd());
  EXPECT_TRUE(watch.look(1).empty());
  spins.page().own = 7;  // it makes progress once more
  EXPECT_TRUE(watch.look(1).empty());
  std::vector<json> news = watch.look(2);
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0]["stuck"], 0);
  std::string text = news[0]["text"];
  EXPECT_EQ(text.find("has made no progress for 3.0 s and waits for no other rank: it sleeps (S"), 0u) << text;
  news = watch.look(1);
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0]["stuck"], 1);
  text = news[0]["text"];
  EXPECT_NE(text.find("it computes (R)"), std::string::npos) << text;
}

TEST(HostWatch, WithoutALimitNothingIsStuck) {
  Child stops(kWaits);
  stops.page().expected = 1;
  HostWatch watch(0, getpid());
  watch.add(0, stops.pid(), stops.fd());
  stops.stop();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(watch.look(1e6).empty());
}

TEST(HostWatch, ARankWithoutAPageIsWatchedByItsProcess) {
  Child stops(kWaits);
  HostWatch watch(3, getpid());
  watch.add(0, stops.pid(), -1);
  EXPECT_TRUE(watch.look(100).empty());
  stops.stop();
  watch.look(2);
  const std::vector<json> news = watch.look(2);
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0]["text"], "has been stopped (SIGSTOP) for 4.0 s");
}

TEST(HostWatch, NoticesEndsAndWakesUpForThem) {
  Child first(kWaits), second(kWaits);
  HostWatch watch(3, getpid());
  EXPECT_FALSE(watch.over()) << "no rank is known yet";
  watch.add(0, first.pid(), first.fd());
  watch.add(1, second.pid(), second.fd());
  first.end(SIGKILL);
  std::vector<pollfd> fds;
  watch.watch(fds);
  ASSERT_EQ(fds.size(), 3u) << "the daemon and two ranks";
  EXPECT_EQ(poll(fds.data(), fds.size(), 30000), 1);
  EXPECT_TRUE(watch.look(0.1).empty());
  EXPECT_FALSE(watch.over());
  watch.end_ranks();
  fds.clear();
  watch.watch(fds);
  ASSERT_EQ(fds.size(), 1u);
  EXPECT_EQ(poll(fds.data(), fds.size(), 30000), 1);
  watch.look(0.1);
  EXPECT_TRUE(watch.over());
}

TEST(HostWatch, SaysThatTheDaemonHasEndedBeforeItsRanks) {
  Child daemon(kWaits), rank(kWaits);
  HostWatch watch(3, daemon.pid());
  watch.add(0, rank.pid(), rank.fd());
  EXPECT_TRUE(watch.look(1).empty());
  const pid_t pid = daemon.pid();
  daemon.end(SIGKILL);
  rank.end(SIGKILL);
  const std::vector<json> news = watch.look(1);
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0]["daemon"], pid);
  EXPECT_TRUE(watch.look(1).empty());
}

TEST(HostWatch, ADaemonThatEndsAfterARankIsNotLost) {
  Child daemon(kWaits), first(kWaits), second(kWaits);
  HostWatch watch(3, daemon.pid());
  watch.add(0, first.pid(), first.fd());
  watch.add(1, second.pid(), second.fd());
  first.end(SIGKILL);
  EXPECT_TRUE(watch.look(1).empty());
  daemon.end(SIGKILL);
  EXPECT_TRUE(watch.look(1).empty());
}

TEST(HostWatch, PutsAnEndDownToMemoryOnlyRightAfterTheKernelHasEndedAProcess) {
  const std::string root = testing::TempDir() + "/host_watch";
  std::filesystem::create_directories(root + "/proc");
  const auto kills = [&](int count) {
    std::ofstream(root + "/proc/vmstat") << "pgfault 9\noom_kill " << count << "\n";
  };
  kills(4);
  Child early(kWaits), killed(kWaits), late(kWaits);
  HostWatch watch(3, getpid(), root);
  watch.add(0, early.pid(), early.fd());
  watch.add(1, killed.pid(), killed.fd());
  watch.add(2, late.pid(), late.fd());
  early.end(SIGKILL);
  EXPECT_TRUE(watch.look(1).empty()) << "those before do not count";
  kills(5);
  EXPECT_TRUE(watch.look(1).empty());
  killed.end(SIGKILL);
  const std::vector<json> news = of_kind(watch.look(1), "memory");
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0]["memory"], 1);
  late.end(SIGKILL);
  EXPECT_TRUE(watch.look(60).empty());
}

}  // namespace
}  // namespace annulus::host_watch_test
