// Tests what the NCCL backend concludes from the states of a device, NCCL, the headers and the clock: a table of cases
// that needs neither a device nor NCCL. nccl_device_test.cc tests the backend with a GPU.
#include "comm/nccl/operation_watch.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/nccl/message_headers.h"
#include "common/error.h"

namespace annulus::nccl_internal::nccl_watch_test {
namespace {

class FakeClock final : public WatchClock {
 public:
  Clock::time_point now() override { return Clock::time_point() + time; }
  void sleep(Clock::duration duration) override {
    time += duration;
    ++sleeps;
    if (on_sleep) on_sleep();
  }
  void set(double seconds) { time = std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); }

  Clock::duration time{0};
  int sleeps = 0;
  std::function<void()> on_sleep;
};

constexpr const char* kDevice = "the device of rank 0";

class FakeTransport final : public Transport {
 public:
  std::string error() override { return says; }
  void abort(const std::string& why) override {
    EXPECT_FALSE(why.empty());
    reason = why;
    ++aborts;
    if (on_abort) on_abort();
  }
  bool capturing() const override {
    if (!capture_fails.empty()) throw std::runtime_error(capture_fails);
    return captured;
  }

  std::string says;
  std::string reason;  // given to abort()
  int aborts = 0;
  std::function<void()> on_abort;
  bool captured = false;
  std::string capture_fails;  // what asking for the state of capture throws
};

constexpr HeaderResult::State kPending = HeaderResult::kPending, kAgree = HeaderResult::kAgree,
                              kDiffer = HeaderResult::kDiffer;

class FakeOperation final : public Operation {
 public:
  explicit FakeOperation(std::string description, Seconds timeout = Seconds(0.3))
      : Operation("attention forward, step 2", std::move(description), timeout) {
    set_issued();
  }

  HeaderResult headers() override {
    ++checks;
    if (!headers_fail.empty()) throw Error(ErrorKind::kComm, "comm", headers_fail);
    return {result, result == kDiffer ? "rank 1 sent 400 bytes, but rank 0 expected 200 bytes" : ""};
  }
  bool reached() override {
    ++checks;
    return at_it;
  }
  bool done() override {
    ++checks;
    if (!device_fails.empty()) throw Error(ErrorKind::kComm, "comm", device_fails);
    return over;
  }
  void release() override {
    ++releases;
    if (on_release) on_release();
  }

  HeaderResult::State result = kAgree;
  std::string headers_fail;  // why the headers cannot come
  bool at_it = false;        // the device has reached the operation
  bool over = false;         // and has completed it
  std::string device_fails;
  int checks = 0, releases = 0;
  std::function<void()> on_release;
};

// Two consecutive operations and the states that a test can set.
struct Scene {
  Scene() {
    watch.add(first);
    watch.add(second);
  }
  FakeClock clock;
  FakeTransport nccl;
  std::shared_ptr<FakeOperation> first = std::make_shared<FakeOperation>("receiving 200 bytes from rank 1");
  std::shared_ptr<FakeOperation> second = std::make_shared<FakeOperation>("all_reduce");
  OperationWatch watch{nccl, kDevice, clock};

  // Returns the number of operations that are neither complete nor abandoned.
  size_t under_way() const {
    return watch.failure()
               ? 0
               : size_t{2} - static_cast<size_t>(first->complete()) - static_cast<size_t>(second->complete());
  }
};

struct Step {
  double time;                          // seconds since the start
  std::function<void(Scene&)> happens;  // before the check at that time
  size_t under_way;                     // after it
  std::string failure = "";             // after it; empty: none
  ErrorKind kind = ErrorKind::kComm;
};

struct Case {
  std::string name;
  std::vector<Step> steps;
};

void nothing(Scene&) {}

constexpr const char* kFirst = "attention forward, step 2: receiving 200 bytes from rank 1: ";
constexpr const char* kSecond = "attention forward, step 2: all_reduce: ";

std::vector<Case> cases() {
  const std::string first = kFirst, second = kSecond;
  const std::string differ = "attention forward, step 2: rank 1 sent 400 bytes, but rank 0 expected 200 bytes";
  const auto both_at_it = [](Scene& s) { s.first->at_it = s.second->at_it = true; };
  const auto headers_late = [](Scene& s) { s.first->result = kPending; };
  const auto broken = [](Scene& s) { s.nccl.says = "unhandled system error"; };
  return {
      {"CompletesInOrder",
       {{0, both_at_it, 2},
        {0.1, [](Scene& s) { s.first->over = true; }, 1},
        {0.2, [](Scene& s) { s.second->over = true; }, 0}}},
      {"OperationCompletesOnlyAfterItsHeaders",
       {{0, [=](Scene& s) { headers_late(s), s.first->at_it = s.first->over = true; }, 2},
        {0.1, [](Scene& s) { s.first->result = kAgree; }, 1}}},
      {"HeadersHaveTheDeadlineOfTheTransfer",
       {{0, [=](Scene& s) { headers_late(s), s.first->at_it = s.first->over = true; }, 2},
        {0.29, nothing, 2},
        {0.3, nothing, 0, first + "not done within 0.3 s"}}},
      {"DeadlineStartsWhenTheDeviceReachesTheOperation",
       {{1000, nothing, 2},
        {2000, [](Scene& s) { s.first->at_it = true; }, 2},
        {2000.29, nothing, 2},
        {2000.3, nothing, 0, first + "not done within 0.3 s"}}},
      {"CompletionSeenAfterTheDeadlineCounts",
       {{0, both_at_it, 2}, {0.29, nothing, 2}, {0.31, [](Scene& s) { s.first->over = true; }, 1}}},
      // Its own event says that the device has reached it, but the operation before it is not complete.
      {"DeadlineOfAQueuedOperationStartsLater",
       {{0, [](Scene& s) { s.second->at_it = true; }, 2},
        {5, nothing, 2},
        {6, [](Scene& s) { s.first->at_it = s.first->over = true; }, 1},
        {6.29, nothing, 1},
        {6.3, nothing, 0, second + "not done within 0.3 s"}}},
      {"HeadersThatDifferAreAMismatch",
       {{0, headers_late, 2}, {0.1, [](Scene& s) { s.first->result = kDiffer; }, 0, differ, ErrorKind::kMismatch}}},
      {"HeadersThatDifferAreAMismatchEvenIfTheDeviceIsDone",
       {{0, [](Scene& s) { s.first->at_it = s.first->over = true, s.first->result = kDiffer; }, 0, differ,
         ErrorKind::kMismatch}}},
      {"HeadersThatCannotComeAreAnError",
       {{0, [](Scene& s) { s.first->headers_fail = "rank 1 failed: no row 17"; }, 0,
         first + "rank 1 failed: no row 17"}}},
      {"DeviceFailureNamesTheOperationAndTheRank",
       {{0, both_at_it, 2},
        {0.1, [](Scene& s) { s.first->device_fails = s.second->device_fails = "an illegal memory access"; }, 0,
         first + "the device of rank 0 failed: an illegal memory access"}}},
      {"DeviceFailureAfterACompleteOperationNamesTheNext",
       {{0,
         [=](Scene& s) {
           both_at_it(s);
           s.first->over = true;
           s.second->device_fails = "an illegal memory access";
         },
         0, second + "the device of rank 0 failed: an illegal memory access"}}},
      // LibTorch raises an earlier failure of the device in any of its calls.
      {"DeviceFailureThatAnotherCallReportsIsRaised",
       {{0, both_at_it, 2},
        {0.1, [](Scene& s) { s.nccl.capture_fails = "CUDA error: an illegal memory access was encountered\nadvice"; },
         0, first + "the device of rank 0 failed: CUDA error: an illegal memory access was encountered"}}},
      {"NcclErrorIsRaisedAtOnceIfTheHeadersAgree",
       {{0, both_at_it, 2}, {0.1, broken, 0, first + "NCCL reports unhandled system error"}}},
      {"NcclErrorWaitsForHeadersThatMayExplainIt",
       {{0, headers_late, 2},
        {1, broken, 2},
        {1.49, nothing, 2},
        {1.5, nothing, 0, first + "NCCL reports unhandled system error"}}},
      {"NcclErrorIsExplainedByHeadersThatDiffer",
       {{0, headers_late, 2},
        {1, broken, 2},
        {1.2, [](Scene& s) { s.first->result = kDiffer; }, 0, differ, ErrorKind::kMismatch}}},
      {"NcclErrorIsNotExplainedByHeadersThatCannotCome",
       {{0, headers_late, 2},
        {1, [=](Scene& s) { broken(s), s.first->headers_fail = "not done within 0.3 s"; }, 0,
         first + "NCCL reports unhandled system error"}}},
      {"NothingIsQueriedDuringGraphCapture",
       {{0,
         [=](Scene& s) {
           both_at_it(s);
           s.nccl.captured = true;
           s.first->over = true;
           s.second->device_fails = "a query would have spoiled the graph";
         },
         2},
        {100,
         [](Scene& s) {
           EXPECT_EQ(s.first->checks + s.second->checks, 0);
           s.nccl.captured = false;
           s.second->device_fails = "";
         },
         1},
        // The deadline starts with the first check after the capture.
        {100.29, nothing, 1},
        {100.3, nothing, 0, second + "not done within 0.3 s"}}},
      {"FirstFailureIsKept",
       {{0, [](Scene& s) { s.first->result = kDiffer; }, 0, differ, ErrorKind::kMismatch},
        {1, broken, 0, differ, ErrorKind::kMismatch},
        {2, [](Scene& s) { s.watch.fail(ErrorKind::kComm, "closed"); }, 0, differ, ErrorKind::kMismatch}}},
  };
}

class NcclWatch : public ::testing::TestWithParam<Case> {};

TEST_P(NcclWatch, Answers) {
  Scene scene;
  const std::vector<std::shared_ptr<FakeOperation>> operations{scene.first, scene.second};
  std::vector<bool> complete(2, false);
  for (const Step& step : GetParam().steps) {
    SCOPED_TRACE("after " + std::to_string(step.time) + " s");
    scene.clock.set(step.time);
    step.happens(scene);
    scene.watch.check();
    EXPECT_EQ(scene.under_way(), step.under_way);
    EXPECT_EQ(scene.watch.failure().has_value(), !step.failure.empty());
    if (scene.watch.failure()) {
      EXPECT_EQ(scene.watch.failure()->text, step.failure);
      EXPECT_EQ(scene.watch.failure()->kind, step.kind);
    }
    // The watch aborts once, at the failure. Failed operations keep their memory; complete ones have released it once.
    EXPECT_EQ(scene.nccl.aborts, step.failure.empty() ? 0 : 1);
    EXPECT_EQ(scene.nccl.reason, step.failure);
    int released = 0;
    for (const auto& operation : operations) {
      EXPECT_EQ(operation->releases, operation->complete() ? 1 : 0);
      released += operation->releases;
    }
    if (step.failure.empty()) {
      EXPECT_EQ(released, 2 - static_cast<int>(step.under_way));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, NcclWatch, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

// The events of an operation mean nothing until NCCL has issued it to the stream.
TEST(NcclWatchIssue, UnissuedOperationsAreNotQueriedAndNotDue) {
  class Unissued final : public Operation {
   public:
    Unissued() : Operation("x", "y", Seconds(0.1)) {}
    HeaderResult headers() override { return {}; }
    bool reached() override { return ++asked > 0; }
    bool done() override { return ++asked > 0; }
    void release() override {}
    int asked = 0;
  };
  FakeClock clock;
  FakeTransport nccl;
  OperationWatch watch(nccl, kDevice, clock);
  const auto operation = std::make_shared<Unissued>();
  watch.add(operation);
  watch.check();
  clock.set(1000);
  watch.check();
  EXPECT_EQ(operation->asked, 0);
  EXPECT_FALSE(watch.failure());
  operation->set_issued();
  watch.check();
  EXPECT_TRUE(operation->complete());
}

// The caller issues an operation without the mutex for a while, in which the ones before it are watched.
TEST(NcclWatchIssue, WhatIsNotIssuedYetKeepsItsPlaceAndItsMemory) {
  class Unissued final : public Operation {
   public:
    Unissued() : Operation("x", "y", Seconds(0.1)) {}
    HeaderResult headers() override { return {}; }
    bool reached() override { return true; }
    bool done() override { return true; }
    void release() override { ++releases; }
    int releases = 0;
  };
  Scene scene;
  const auto unissued = std::make_shared<Unissued>();
  scene.watch.add(unissued);
  scene.first->over = true;
  scene.watch.check();
  EXPECT_TRUE(scene.first->complete());
  scene.second->at_it = true;
  scene.watch.check();
  scene.clock.set(1);
  scene.watch.check();  // the second one is late
  ASSERT_TRUE(scene.watch.failure());
  EXPECT_EQ(scene.watch.failure()->text, std::string(kSecond) + "not done within 0.3 s");
  unissued->set_issued();
  scene.watch.check();
  EXPECT_FALSE(unissued->complete());
  EXPECT_EQ(unissued->releases, 0);
}

TEST(NcclWatchIssue, LaterHeadersExplainAFailedCall) {
  Scene scene;
  scene.nccl.says = "unhandled system error";
  scene.first->result = kPending;
  scene.clock.on_sleep = [&] {
    if (scene.clock.sleeps == 20) scene.first->result = kDiffer;
  };
  scene.watch.fail_unless_headers_explain(ErrorKind::kComm, "ncclGroupEnd failed");
  ASSERT_TRUE(scene.watch.failure());
  EXPECT_EQ(scene.watch.failure()->kind, ErrorKind::kMismatch);
  EXPECT_EQ(scene.clock.sleeps, 20);
}

TEST(NcclWatchIssue, FailedCallIsReportedIfHeadersAreLate) {
  Scene scene;
  scene.nccl.says = "unhandled system error";
  scene.first->result = kPending;
  scene.watch.fail_unless_headers_explain(ErrorKind::kComm, "ncclGroupEnd failed");
  ASSERT_TRUE(scene.watch.failure());
  EXPECT_EQ(scene.watch.failure()->text, "ncclGroupEnd failed");
  EXPECT_EQ(scene.clock.time, OperationWatch::kHeadersBehind);
  EXPECT_EQ(scene.nccl.aborts, 1);
}

TEST(NcclWatchIssue, FailedCallIsReportedAtOnceIfNcclHasNoError) {
  Scene scene;
  scene.first->result = kPending;
  scene.watch.fail_unless_headers_explain(ErrorKind::kComm, "a CUDA call failed");
  EXPECT_EQ(scene.watch.failure()->text, "a CUDA call failed");
  EXPECT_EQ(scene.clock.sleeps, 0);
}

// If sizes differ, NCCL stays in progress forever and reports no error.
TEST(NcclWatchIssue, ReceivedHeadersExplainATimeout) {
  Scene scene;
  scene.second->result = kDiffer;
  scene.watch.fail_unless_headers_explain(ErrorKind::kComm, "not done within 0.3 s");
  ASSERT_TRUE(scene.watch.failure());
  EXPECT_EQ(scene.watch.failure()->kind, ErrorKind::kMismatch);
  EXPECT_EQ(scene.clock.sleeps, 0);
  EXPECT_EQ(scene.nccl.aborts, 1);
}

// A ring over many layers has hundreds of operations under way, and the executor asks every few milliseconds.
TEST(NcclWatchCost, ALookAsksAsMuchHoweverManyOperationsAreUnderWay) {
  FakeClock clock;
  FakeTransport nccl;
  OperationWatch watch(nccl, kDevice, clock);
  std::vector<std::shared_ptr<FakeOperation>> operations;
  for (int i = 0; i < 500; ++i) {
    operations.push_back(std::make_shared<FakeOperation>("number " + std::to_string(i)));
    watch.add(operations.back());
  }
  const auto asked = [&] {
    int checks = 0;
    for (const auto& operation : operations) checks += std::exchange(operation->checks, 0);
    return checks;
  };
  operations[250]->result = kPending;
  watch.check();
  EXPECT_EQ(asked(), 251 + 2);  // once for each set of headers that has come; the device is asked about the first alone
  watch.check();
  EXPECT_EQ(asked(), 1 + 2);
  operations[250]->result = kAgree;
  watch.check();
  EXPECT_EQ(asked(), 250 + 2);
  watch.check();
  EXPECT_EQ(asked(), 2);
  operations[0]->over = operations[1]->over = true;
  watch.check();
  EXPECT_EQ(asked(), 3 + 1);  // whether three are done, and whether the device has reached the third
  EXPECT_TRUE(operations[1]->complete());
  EXPECT_FALSE(operations[2]->complete());
  // Headers that differ are found at once, although the operations before them are under way.
  const auto differs = std::make_shared<FakeOperation>("the last");
  differs->result = kDiffer;
  watch.add(differs);
  watch.check();
  ASSERT_TRUE(watch.failure());
  EXPECT_EQ(watch.failure()->kind, ErrorKind::kMismatch);
}

TEST(NcclWatchThread, DeviceFailureDoesNotEndTheProcess) {
  FakeTransport nccl;
  nccl.capture_fails = "CUDA error: an illegal memory access was encountered";
  std::promise<void> aborted;
  nccl.on_abort = [&] { aborted.set_value(); };
  OperationWatch watch(nccl, "the device of rank 3");
  watch.start([] {});
  {
    std::lock_guard<std::mutex> lock(watch.mutex());
    watch.add(std::make_shared<FakeOperation>("receiving 200 bytes from rank 1", Seconds(86400)));
  }
  watch.wake();
  aborted.get_future().get();  // only the thread can have checked
  watch.stop();
  ASSERT_TRUE(watch.failure());
  EXPECT_EQ(watch.failure()->kind, ErrorKind::kComm);
  EXPECT_EQ(watch.failure()->text, std::string(kFirst) + "the device of rank 3 failed: " + nccl.capture_fails);
}

TEST(NcclWatchThread, WhatFailsAtItsStartBecomesAFailure) {
  FakeTransport nccl;
  std::promise<void> aborted;
  nccl.on_abort = [&] { aborted.set_value(); };
  OperationWatch watch(nccl, kDevice);
  watch.start([] { throw std::runtime_error("no such device"); });
  aborted.get_future().get();
  watch.stop();
  EXPECT_EQ(watch.failure()->text, "the thread that watches the device of rank 0 stopped: no such device");
}

TEST(NcclWatchThread, PollsByItselfAndStopsWithWorkInProgress) {
  FakeTransport nccl;
  OperationWatch watch(nccl, kDevice);
  std::promise<void> began, released;
  watch.start([&] { began.set_value(); });
  began.get_future().get();
  const auto never = std::make_shared<FakeOperation>("never done", Seconds(86400));
  const auto soon = std::make_shared<FakeOperation>("soon done", Seconds(86400));
  soon->on_release = [&] { released.set_value(); };
  soon->over = true;
  {
    std::lock_guard<std::mutex> lock(watch.mutex());
    watch.add(soon);
    watch.add(never);
  }
  watch.wake();
  released.get_future().get();  // only the thread can have checked
  watch.stop();
  EXPECT_TRUE(soon->complete());
  EXPECT_FALSE(never->complete());
  EXPECT_FALSE(watch.failure());
}
}  // namespace
}  // namespace annulus::nccl_internal::nccl_watch_test
