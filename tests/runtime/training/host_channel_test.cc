// On GPUs a job has two channels: the communicator itself, which carries tensors of the device, and its host(), which
// carries tensors of the CPU and control messages. Here both are thread communicators, and the test records the
// names of the operations on the device's channel: only attention and sums of gradients and losses may use it. It also
// records which communicators are split off it, because each takes memory of a GPU and a thread.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "comm/communicator_backend.h"
#include "comm/headers.h"
#include "comm/threads/threads.h"
#include "runtime/attend/attend.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::host_channel_test {
namespace {

enum class WaitOf { kRing, kSums };

// The names of the operations on the device's channel, over all ranks, with their numbers except those of hops.
class Names {
 public:
  void add(OpLabel label) {
    const std::lock_guard lock(mutex_);
    std::string name(label.operation);
    if (label.counted != "hop" && label.number > 0) {
      name += ", " + std::string(label.counted) + " " + std::to_string(label.number);
    }
    seen_.insert(name);
  }
  std::set<std::string> seen() const { return seen_; }

  // A communicator of so many ranks was split off the device's channel, on the rank that is its first.
  void add_split(int ranks, int max_ctas) {
    const std::lock_guard lock(mutex_);
    splits_.emplace(ranks, max_ctas);
  }
  std::multiset<std::pair<int, int>> splits() const { return splits_; }

  // A transfer of this communicator's first rank, for which its device waits a second.
  void add_wait(WaitOf what) {
    const std::lock_guard lock(mutex_);
    ++waits_[what];
  }
  double seconds(WaitOf what) const { return waits_.at(what); }

 private:
  std::mutex mutex_;
  std::set<std::string> seen_;
  std::multiset<std::pair<int, int>> splits_;
  std::map<WaitOf, double> waits_;
};

// An operation of another communicator.
class Forwarded final : public StartedOperation {
 public:
  explicit Forwarded(std::unique_ptr<Work> work) : work_(std::move(work)) {}
  bool test() override { return work_->test(); }
  bool wait() override {
    work_->wait();
    return true;
  }
  void abandon() override { work_.reset(); }

 private:
  std::unique_ptr<Work> work_;
};

class TwoChannels final : public CommunicatorBackend {
 public:
  TwoChannels(std::unique_ptr<Communicator> device, std::unique_ptr<Communicator> host, Names& names)
      : CommunicatorBackend(device->rank(), device->size(), at::kCPU),
        device_(std::move(device)),
        host_(std::move(host)),
        names_(names) {}

  std::string_view backend() const override { return "two channels"; }
  Communicator& host() override { return *host_; }
  // As on a GPU, the waits of the device become known here.
  void progress() override {
    device_->progress();
    add_wait(WaitFor::kExchange, Seconds(std::exchange(ring_, 0)));
    add_wait(WaitFor::kReduce, Seconds(std::exchange(sums_, 0)));
  }

 protected:
  std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) override {
    names_.add(label);
    ++ring_;
    if (rank() == 0) names_.add_wait(WaitOf::kRing);
    return std::make_unique<Forwarded>(device_->exchange(sends, receives, label));
  }
  std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    names_.add(label);
    device_->all_reduce(tensor, op, label);
    return nullptr;
  }
  std::unique_ptr<StartedOperation> begin(const comm_internal::Begun& call) override {
    names_.add(call.label);
    if (call.reduces()) {
      ++sums_;
      if (rank() == 0) names_.add_wait(WaitOf::kSums);
    }
    const bool all_reduces = call.out.is_same(call.in);
    return std::make_unique<Forwarded>(all_reduces      ? device_->begin_all_reduce(call.in, call.op(), call.label)
                                       : call.reduces() ? device_->begin_reduce_scatter(call.out, call.in, call.label)
                                                        : device_->begin_all_gather(call.out, call.in, call.label));
  }
  std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    names_.add(label);
    device_->broadcast(tensor, root, label);
    return nullptr;
  }
  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel) override {
    std::unique_ptr<Communicator> device = device_->split(color, key), host = host_->split(color, key);
    if (!device) return nullptr;
    if (device->rank() == 0) names_.add_split(device->size(), split_options().max_ctas);
    return std::make_unique<TwoChannels>(std::move(device), std::move(host), names_);
  }

 private:
  std::unique_ptr<Communicator> device_, host_;
  Names& names_;
  double ring_ = 0, sums_ = 0;  // seconds that nobody has been told of
};

void run_with_channels(int ranks, Names& names, const std::function<void(Communicator&)>& body) {
  run_ranks(ranks, [&](Communicator& world) {
    TwoChannels channels(world.split(0, world.rank()), world.split(0, world.rank()), names);
    body(channels);
  });
}

std::set<std::string> carried(int ranks, const std::function<void(Communicator&)>& body) {
  Names names;
  run_with_channels(ranks, names, body);
  return names.seen();
}

TEST(HostChannel, AttendSendsOnlyAttentionOverTheDevice) {
  const TestFolder folder;
  AttendOptions o;
  o.random = "batch=2,queries=83,heads=4,kv_heads=2,dim=8,seed=3";
  o.output = folder.path() + "/out.safetensors";
  o.backward = true;
  o.check = true;
  const auto attend = [&](Communicator& world) { AttendJob(o, {world.hosts()}).run(world); };
  EXPECT_EQ(carried(3, attend), (std::set<std::string>{"attend forward", "attend backward"}));
  // Blocks are selected from sums over the keys and queries of all ranks, which are on the device.
  o.pattern = "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2 }";
  EXPECT_EQ(carried(3, attend), (std::set<std::string>{"attend", "attend forward", "attend backward"}));
}

TEST(HostChannel, TrainingSendsOnlyAttentionAndSumsOverTheDevice) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.validation.every = 3;
  const std::set<std::string> names = carried(2, [&](Communicator& world) {
    std::ostringstream out;
    TrainOptions options;
    options.out = &out;
    EXPECT_EQ(run_training(config, world, options), 0);
  });
  // Operations are named by the step under way, counted from 1 as in the progress lines.
  const std::string last = std::to_string(config.run.steps);
  for (const std::string& step : {std::string("1"), last}) {
    EXPECT_EQ(names.count("summing the gradients of q, k and v of layer 1, step " + step), 1U)
        << ::testing::PrintToString(names);
    EXPECT_EQ(names.count("summing the gradients of the output projection and MLP of layer 0, step " + step), 1U);
    EXPECT_EQ(names.count("gathering the gradients of the embedding, step " + step), 1U);
    EXPECT_EQ(names.count("exchanging step results, step " + step), 1U);
    EXPECT_EQ(names.count("step " + step + ", attention, layer 0 forward"), 1U);
  }
  EXPECT_EQ(names.count("validation loss, batch 1"), 1U);
  for (const std::string& name : names) {
    EXPECT_TRUE(name.find("the gradients of ") != std::string::npos || name.starts_with("exchanging step results") ||
                name.starts_with("validation loss, batch ") || name.find(", attention, layer ") != std::string::npos)
        << name;
  }
}

// What is gathered and summed at once is a half of a layer.
TEST(HostChannel, ShardedTrainingNamesWhatItGathersAndSums) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  config.optimizer.shard = 3;
  const std::set<std::string> names = carried(2, [&](Communicator& world) {
    std::ostringstream out;
    TrainOptions options;
    options.out = &out;
    EXPECT_EQ(run_training(config, world, options), 0);
  });
  std::set<std::string> want;
  for (const std::string unit : {"the embedding", "q, k and v of layer 0", "the output projection and MLP of layer 0",
                                 "q, k and v of layer 1", "the output projection and MLP of layer 1", "the output"}) {
    for (const char* what : {"gathering the weights of ", "summing the gradients of "}) {
      want.insert(what + unit + ", step 1");
    }
  }
  std::set<std::string> of_units;
  for (const std::string& name : names) {
    if (name.starts_with("gathering the ") || name.starts_with("summing the ")) of_units.insert(name);
  }
  EXPECT_EQ(of_units, want);
}

TEST(HostChannel, TrainingConnectsOnlyRanksThatTransfer) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  config.network.exchange_ctas = 6;
  const auto splits = [&](int ranks, int data) {
    config.mesh.data = data;
    Names names;
    run_with_channels(ranks, names, [&](Communicator& world) {
      std::ostringstream out;
      TrainOptions options;
      options.out = &out;
      EXPECT_EQ(run_training(config, world, options), 0);
    });
    return names.splits();
  };
  using Splits = std::multiset<std::pair<int, int>>;  // ranks, and the bound on thread blocks
  const std::pair<int, int> ring(2, 6), sums_of_two(2, 0), sums_of_four(4, 0);
  EXPECT_EQ(splits(2, 1), (Splits{ring, sums_of_two}));
  EXPECT_EQ(splits(2, 2), (Splits{sums_of_two}));  // rings of one rank transfer nothing
  EXPECT_EQ(splits(4, 2), (Splits{ring, ring, sums_of_four}));
}

// The metrics hold what a device has waited, although that is known only after the call that waits.
TEST(HostChannel, MetricsHoldWaitsThatADeviceTellsLater) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.validation.every = 0;
  Names names;
  run_with_channels(2, names, [&](Communicator& world) {
    std::ostringstream out;
    TrainOptions options;
    options.out = &out;
    EXPECT_EQ(run_training(config, world, options), 0);
  });
  double ring = 0, sums = 0, all = 0;
  std::ifstream file(folder.path() + "/runs/tiny-001/metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    const auto metrics = nlohmann::json::parse(line);
    if (!metrics.contains("loss")) continue;
    ring += metrics.at("exposed_ring_seconds").get<double>();
    sums += metrics.at("exposed_reduce_seconds").get<double>();
    all += metrics.at("exposed_communication_seconds").get<double>();
  }
  EXPECT_GT(ring, 0);
  EXPECT_EQ(ring, names.seconds(WaitOf::kRing));
  EXPECT_EQ(sums, names.seconds(WaitOf::kSums));
  EXPECT_EQ(all, ring + sums);
}

}  // namespace
}  // namespace annulus::host_channel_test
