// See operation_watch.h.
#include "comm/nccl/operation_watch.h"

#include <utility>
#include <vector>

#include "comm/checks.h"

namespace annulus::nccl_internal {

using comm_internal::describe_seconds;

namespace {

class RealClock final : public WatchClock {
 public:
  Clock::time_point now() override { return Clock::now(); }
  void sleep(Clock::duration duration) override { std::this_thread::sleep_for(duration); }
};

}  // namespace

WatchClock& real_clock() {
  static RealClock clock;
  return clock;
}

void OperationWatch::start(std::function<void()> begin) {
  thread_ = std::thread([this, begin = std::move(begin)] { run(begin); });
}

void OperationWatch::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void OperationWatch::run(const std::function<void()>& begin) {
  begin();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    if (operations_.empty()) {
      wake_.wait(lock, [this] { return stop_ || !operations_.empty(); });
    } else {
      wake_.wait_for(lock, kInterval, [this] { return stop_; });
    }
    if (!stop_) look();
  }
}

void OperationWatch::fail(ErrorKind kind, const std::string& text) {
  if (failure_) return;
  failure_ = Failure{kind, text};
  transport_.abort();
  [[maybe_unused]] const auto* leaked = new auto(std::move(operations_));
  operations_.clear();
}

void OperationWatch::fail_unless_headers_explain(ErrorKind kind, const std::string& text) {
  const auto believed = clock_.now() + kHeadersBehind;
  // Headers that have come and differ explain any failure, also a call of NCCL that does not finish. Headers that have
  // not come are waited for only if NCCL reports an error.
  while (headers_may_explain() && !transport_.error().empty() && clock_.now() < believed) {
    clock_.sleep(std::chrono::milliseconds(1));
  }
  fail(kind, text);
}

// Returns true if the headers have come and agree. If they differ, it calls fail() with the difference.
bool OperationWatch::headers_agree(Operation& operation) {
  const HeaderVerdict verdict = operation.headers();
  if (verdict.state == HeaderVerdict::kDiffer)
    fail(ErrorKind::kMismatch, operation.label() + ": " + verdict.difference);
  return verdict.state == HeaderVerdict::kAgree;
}

// Returns true as long as some headers have not come.
bool OperationWatch::headers_may_explain() {
  bool pending = false;
  for (const std::shared_ptr<Operation>& operation : std::vector(operations_.begin(), operations_.end())) {
    try {
      pending = !headers_agree(*operation) || pending;
    } catch (const Error&) {
      // Headers that cannot come do not explain the failure.
    }
    if (failure_) return false;
  }
  return pending;
}

void OperationWatch::look() {
  if (failure_ || operations_.empty()) return;
  if (transport_.capturing()) return;  // the watching thread, which captures nothing, still checks
  const auto now = clock_.now();
  if (const std::string error = transport_.error(); !error.empty()) {
    if (!broken_since_) broken_since_ = now;
    if (headers_may_explain() && now - *broken_since_ < kHeadersBehind) return;  // a later call decides
    if (!failure_) fail(ErrorKind::kComm, operations_.front()->what() + ": NCCL reports " + error);
    return;
  }
  bool turn = true;  // whether the device is done with all earlier operations
  for (auto it = operations_.begin(); it != operations_.end();) {
    const std::shared_ptr<Operation> operation = *it;
    bool agreed = false;
    bool done = false;
    try {
      agreed = headers_agree(*operation);
      if (failure_) return;
      done = operation->issued_ && operation->done();
    } catch (const Error& error) {
      fail(error.kind(), operation->what() + ": " + plain(error));
      return;
    }
    if (done && agreed) {
      operation->complete_ = true;
      operation->release();
      it = operations_.erase(it);
      continue;
    }
    if (turn && operation->issued_ && !operation->deadline_ && operation->reached()) {
      operation->deadline_ = now + comm_internal::clock_duration(operation->timeout_);
    }
    if (operation->deadline_ && now >= *operation->deadline_) {
      fail(ErrorKind::kComm, operation->what() + ": not done within " + describe_seconds(operation->timeout_.count()));
      return;
    }
    turn = turn && done;
    ++it;
  }
}

}  // namespace annulus::nccl_internal
