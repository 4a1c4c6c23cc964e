// Tests what the launcher makes of what the watches of its hosts say, and of connections that end.
#include "launcher/launch/watchers.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "launcher/hosts/sockets.h"

namespace annulus::watchers_test {
namespace {

using nlohmann::json;
using Texts = std::vector<std::string>;

// Two hosts with two ranks each, and the watches' ends of their connections. Rank I of mpirun is rank 10 + I of the
// job.
class WatchersTest : public testing::Test {
 protected:
  WatchersTest() {
    for (int& fd : far_) fd = -1;
  }
  ~WatchersTest() override {
    for (const int fd : far_) {
      if (fd >= 0) close(fd);
    }
  }

  void add_watch(int rank) {
    std::array<int, 2> ends{};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
    far_[rank] = ends[1];
    watchers_.add_watcher(static_cast<size_t>(rank), ends[0]);
  }
  void add_rank(int rank) {
    const json beat = {{"place", rank < 2 ? "here" : "there"}, {"process", 100 + rank}, {"page", 5}};
    watchers_.add_rank(static_cast<size_t>(rank), rank < 2 ? "near" : "far", CheckedJson(beat, "test", "a rank"));
  }
  void add_all() {
    add_watch(0);
    add_watch(2);
    for (int rank = 0; rank < 4; ++rank) add_rank(rank);
  }

  json heard(int rank) {
    std::string line;
    if (read_line(far_[rank], line) != LineState::kWhole) return nullptr;
    return json::parse(line);
  }
  void say(int rank, const json& message) {
    write_all(far_[rank], message_line(message), std::chrono::steady_clock::now());
    watchers_.read();
  }
  void end_watch(int rank) {
    close(std::exchange(far_[rank], -1));
    watchers_.read();
  }

  Texts faults() {
    Texts texts;
    for (const Watchers::Fault& fault : watchers_.take_faults()) {
      texts.push_back(std::to_string(fault.rank) + ": " + fault.text);
    }
    return texts;
  }

  Watchers watchers_{"here", [](size_t rank) { return 10 + static_cast<int>(rank); }};
  std::array<int, 4> far_{};
};

TEST_F(WatchersTest, EachWatchIsToldTheRanksOfItsHost) {
  add_watch(0);
  EXPECT_TRUE(heard(0).is_null());
  add_rank(0);
  EXPECT_EQ(heard(0), json({{"rank", 0}, {"process", 100}, {"page", 5}}));
  add_rank(3);
  add_rank(1);
  EXPECT_EQ(heard(0)["rank"], 1);
  EXPECT_TRUE(heard(0).is_null());
  add_rank(2);
  add_watch(2);  // later than the ranks
  EXPECT_EQ(heard(2)["rank"], 2);
  EXPECT_EQ(heard(2)["rank"], 3);
  std::vector<pollfd> fds;
  watchers_.watch(fds);
  EXPECT_EQ(fds.size(), 2u);
}

TEST_F(WatchersTest, SaysWhichRankStandsStill) {
  add_all();
  say(2, {{"stuck", 3}, {"text", "has been stopped (SIGSTOP) for 3.1 s"}});
  EXPECT_EQ(faults(), Texts{"3: rank 13 on host far has been stopped (SIGSTOP) for 3.1 s"});
  EXPECT_EQ(faults(), Texts());
}

TEST_F(WatchersTest, AWatchSpeaksForTheRanksOfItsHostAlone) {
  add_all();
  for (const int rank : {0, 1, 4, INT32_MAX}) {
    say(2, {{"stuck", rank}, {"text", "has been stopped"}});
    say(2, {{"memory", rank}});
    EXPECT_FALSE(watchers_.ended_for_memory(static_cast<size_t>(rank)));
  }
  EXPECT_EQ(faults(), Texts());
}

TEST_F(WatchersTest, RanksThatEndAreNoLostHost) {
  add_all();
  watchers_.rank_ended(2, 0, true);
  watchers_.rank_ended(3, 0, false);
  say(2, {{"over", true}});
  end_watch(2);
  EXPECT_EQ(faults(), Texts());
  EXPECT_TRUE(watchers_.open());
  end_watch(0);
  EXPECT_FALSE(watchers_.open());
}

TEST_F(WatchersTest, RanksThatAreKilledAreNoLostHostWhileTheirWatchLives) {
  add_all();
  watchers_.rank_ended(2, 0, false);
  watchers_.rank_ended(3, ECONNRESET, false);
  EXPECT_EQ(faults(), Texts());
  end_watch(2);
  EXPECT_EQ(faults(), Texts{"2: host far is lost: ranks 12-13 and the watch of the host ended there at once"});
  EXPECT_EQ(faults(), Texts()) << "it is said once";
}

TEST_F(WatchersTest, AWatchThatIsKilledAloneIsNoLostHost) {
  add_all();
  end_watch(2);
  watchers_.rank_ended(2, 0, false);
  EXPECT_EQ(faults(), Texts()) << "rank 3 still lives";
}

TEST_F(WatchersTest, AHostThatDoesNotAnswerIsNamedAtOnce) {
  for (const int error : {ETIMEDOUT, EHOSTUNREACH, ENETUNREACH}) {
    Watchers watchers("here", [](size_t rank) { return static_cast<int>(rank); });
    const json beat = {{"place", "there"}, {"process", 7}, {"page", -1}};
    for (const size_t rank : {4, 7}) watchers.add_rank(rank, "far", CheckedJson(beat, "test", "a rank"));
    watchers.rank_ended(7, error, false);
    const std::vector<Watchers::Fault> faults = watchers.take_faults();
    ASSERT_EQ(faults.size(), 1u);
    EXPECT_EQ(faults[0].rank, 4u);
    EXPECT_EQ(faults[0].text,
              "host far (ranks 4, 7) does not answer any more: it is down, or the network between it and this host is");
  }
}

TEST_F(WatchersTest, NamesADaemonThatIsLostOnceItsRanksHaveEndedWithIt) {
  add_all();
  say(2, {{"daemon", 77}});
  EXPECT_EQ(faults(), Texts());
  watchers_.rank_ended(2, 0, false);
  watchers_.rank_ended(3, 0, false);
  EXPECT_EQ(faults(), Texts{"2: mpirun's daemon on host far (process 77) has ended, and ranks 12-13 with it"});
}

TEST_F(WatchersTest, RanksThatHaveSaidHowTheyEndAreNotLostWithTheDaemon) {
  add_all();
  say(2, {{"daemon", 77}});
  watchers_.rank_ended(2, 0, true);
  watchers_.rank_ended(3, 0, true);
  EXPECT_EQ(faults(), Texts());
}

TEST_F(WatchersTest, AHostWhoseRanksEndAfterThoseOfAnotherIsNotLost) {
  add_all();
  watchers_.rank_ended(1, 0, false);
  say(2, {{"daemon", 77}});
  watchers_.rank_ended(2, 0, false);
  watchers_.rank_ended(3, 0, false);
  end_watch(2);
  EXPECT_EQ(faults(), Texts());
}

TEST_F(WatchersTest, TheHostOfTheLauncherIsNotLost) {
  add_all();
  say(0, {{"daemon", 77}});
  watchers_.rank_ended(0, 0, false);
  watchers_.rank_ended(1, 0, false);
  end_watch(0);
  EXPECT_EQ(faults(), Texts());
}

TEST_F(WatchersTest, KeepsWhichRanksEndedForLackOfMemory) {
  add_all();
  say(0, {{"memory", 1}});
  EXPECT_TRUE(watchers_.ended_for_memory(1));
  EXPECT_FALSE(watchers_.ended_for_memory(0));
}

TEST_F(WatchersTest, MalformedMessagesSayNothing) {
  add_all();
  for (const json& message : {json({{"stuck", -1}, {"text", "x"}}), json({{"stuck", 1}}), json::array(), json("x")}) {
    say(0, message);
  }
  EXPECT_EQ(faults(), Texts());
}

}  // namespace
}  // namespace annulus::watchers_test
