// Clocks of ranks, and the records of all ranks in one file.
#include "comm/gather_trace.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus::gather_trace_test {
namespace {

TEST(AlignClock, FindsTheOffsetWithinTheErrorThatItStates) {
  run_ranks(4, [](Communicator& world) {
    constexpr int64_t kSkews[] = {5'000'000'000, 0, -3'600'000'000'000, 5'000'000'000};
    const int64_t skew = kSkews[world.rank()];
    // Ranks 0 and 3 share a clock.
    const RankClock clock{world.rank() % 3 == 0 ? "a" : "b", [&] { return trace_clock() + skew; }};
    const ClockOffset found = align_clock(world, clock);
    EXPECT_LE(std::abs(found.offset - (skew - kSkews[0])), found.error);
    EXPECT_EQ(found.error == 0, world.rank() % 3 == 0);
  });
}

// Sends `count` messages around the ring of a communicator, and begins a collective meanwhile.
void work(Communicator& comm, int count) {
  const int next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
  const at::Tensor out = at::zeros({8}), in = at::empty({8}), none = at::empty({0});
  for (int i = 0; i < count; ++i) {
    const TraceHop hop(i + 1);
    const TraceSpan span(TraceKind::kPhase, "hop");
    at::Tensor sum = at::zeros({2});
    const std::unique_ptr<Work> begun = comm.begin_all_reduce(sum, ReduceOp::kSum, {"a sum"});
    comm.exchange({{out, next}, {none, next}}, {{in, before}, {none, before}}, {"round", i + 1, "hop"})->wait();
    begun->wait();
  }
}

nlohmann::json read_json(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

TEST(GatherTrace, JoinsTheEndsOfMessagesOfAllCommunicators) {
  const std::string path = testing::TempDir() + "/joined.json";
  constexpr int kRanks = 4, kWorld = 3, kPair = 2;
  run_ranks(kRanks, [&](Communicator& world) {
    const TraceThread thread(world.rank(), kMainThread);
    const std::unique_ptr<Communicator> pair = world.split(world.rank() / 2, world.rank());
    TraceWindow window(world.rank());
    work(world, kWorld);
    work(*pair, kPair);
    const GatheredTrace gathered = gather_trace(world, window.finish(), path, {{"what", "a test"}});
    EXPECT_EQ(gathered.dropped, 0);
    EXPECT_EQ(gathered.clock_error, 0);  // threads share a clock
  });
  const nlohmann::json json = read_json(path);
  EXPECT_EQ(json["otherData"]["what"], "a test");
  std::map<std::string, std::vector<const nlohmann::json*>> begins, ends;
  std::map<int, int> sends, receives, collectives;
  std::map<std::string, std::pair<double, int>> open;
  double first = 1;
  for (const auto& event : json["traceEvents"]) {
    const std::string phase = event["ph"];
    if (phase == "s") begins[event["id"]].push_back(&event);
    if (phase == "f") ends[event["id"]].push_back(&event);
    if (event.contains("ts")) first = std::min(first, event["ts"].get<double>());
    if (phase != "b") continue;
    if (event["name"] == "send") ++sends[event["pid"]];
    if (event["name"] == "receive") ++receives[event["pid"]];
    if (event["name"] == "all_reduce") ++collectives[event["pid"]];
    EXPECT_FALSE(event["args"].contains("unfinished"));
  }
  EXPECT_EQ(first, 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(sends[rank], kWorld + kPair);  // a message without elements moves nothing
    EXPECT_EQ(receives[rank], kWorld + kPair);
    EXPECT_EQ(collectives[rank], kWorld + kPair);
  }
  EXPECT_EQ(begins.size(), static_cast<size_t>(kRanks * (kWorld + kPair)));
  EXPECT_EQ(ends.size(), begins.size());
  for (const auto& [id, of] : begins) {
    ASSERT_EQ(of.size(), 1U) << id;
    ASSERT_EQ(ends[id].size(), 1U) << id;
    EXPECT_LE((*of[0])["ts"].get<double>(), (*ends[id][0])["ts"].get<double>());
    EXPECT_NE((*of[0])["pid"], (*ends[id][0])["pid"]);
  }
}

TEST(GatherTrace, WithoutSomeRecordsThereAreNoArrows) {
  const std::string path = testing::TempDir() + "/dropped.json";
  run_ranks(2, [&](Communicator& world) {
    const TraceThread thread(world.rank(), kMainThread);
    TraceWindow window(world.rank(), world.rank() == 0 ? 5 : 1000);
    work(world, 4);
    EXPECT_GT(gather_trace(world, window.finish(), path, {}).dropped, 0);
  });
  for (const auto& event : read_json(path)["traceEvents"]) EXPECT_TRUE(event["ph"] != "s" && event["ph"] != "f");
}

TEST(GatherTrace, AllRanksRaiseIfTheFileCannotBeWritten) {
  const std::string path = testing::TempDir() + "/no_such_folder/trace.json";
  run_ranks(3, [&](Communicator& world) {
    const TraceThread thread(world.rank(), kMainThread);
    TraceWindow window(world.rank());
    work(world, 1);
    try {
      gather_trace(world, window.finish(), path, {});
      ADD_FAILURE() << "rank " << world.rank();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource);
      EXPECT_NE(std::string(error.what()).find("no_such_folder"), std::string::npos) << error.what();
    }
    world.barrier({"still usable"});
  });
}

}  // namespace
}  // namespace annulus::gather_trace_test
