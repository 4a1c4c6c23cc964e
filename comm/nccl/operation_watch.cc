// See operation_watch.h.
#include "comm/nccl/operation_watch.h"

#include <string_view>
#include <vector>

#include "comm/checks.h"

namespace annulus::nccl_internal {

using comm_internal::missed_deadline;

namespace {

class RealClock final : public WatchClock {
 public:
  Clock::time_point now() override { return Clock::now(); }
  void sleep(Clock::duration duration) override { std::this_thread::sleep_for(duration); }
};

}  // namespace

std::string in_short(const std::exception& error) {
  if (const auto* own = dynamic_cast<const Error*>(&error)) return plain(*own);
  const std::string_view text = error.what();
  return std::string(text.substr(0, text.find('\n')));
}

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

// An exception that left the thread would end the process without naming an operation.
void OperationWatch::run(const std::function<void()>& begin) {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  try {
    begin();
    lock.lock();
    while (!stop_) {
      if (operations_.empty()) {
        wake_.wait(lock, [this] { return stop_ || !operations_.empty(); });
      } else {
        wake_.wait_for(lock, kInterval, [this] { return stop_; });
      }
      if (!stop_) check();
    }
  } catch (const std::exception& e) {
    if (!lock.owns_lock()) lock.lock();
    fail(ErrorKind::kComm, "the thread that watches " + device_ + " stopped: " + in_short(e));
  }
}

void OperationWatch::fail(ErrorKind kind, const std::string& text) {
  if (failure_) return;
  failure_ = Failure{kind, text};
  transport_.abort(text);
  [[maybe_unused]] const auto* leaked = new auto(std::move(operations_));
  operations_.clear();
  agreed_ = 0;
}

void OperationWatch::fail_device(const std::string& what, const std::string& reason) {
  fail(ErrorKind::kComm, what + ": " + device_ + " failed: " + reason);
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
  const HeaderResult result = operation.headers();
  if (result.state == HeaderResult::kDiffer) fail(ErrorKind::kMismatch, operation.label() + ": " + result.difference);
  return result.state == HeaderResult::kAgree;
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

void OperationWatch::check() {
  if (failure_ || operations_.empty()) return;
  try {
    check_once();
  } catch (const std::exception& e) {
    // LibTorch and CUDA may report an earlier failure of the device in any call.
    fail_device(operations_.empty() ? "watching transfers" : operations_.front()->what(), in_short(e));
  }
}

void OperationWatch::check_once() {
  if (transport_.capturing()) return;  // the watching thread, which captures nothing, still checks
  const auto now = clock_.now();
  if (const std::string error = transport_.error(); !error.empty()) {
    if (!broken_since_) broken_since_ = now;
    if (headers_may_explain() && now - *broken_since_ < kHeadersBehind) return;  // a later call decides
    if (!failure_) fail(ErrorKind::kComm, operations_.front()->what() + ": NCCL reports " + error);
    return;
  }
  compare_headers();
  if (!failure_) complete_operations();
  if (failure_ || operations_.empty()) return;
  // Only the first operation can be due: the device has not reached the others, or they wait for earlier headers.
  Operation& first = *operations_.front();
  if (first.issued_ && !first.deadline_ && first.reached()) {
    first.deadline_ = now + comm_internal::clock_duration(first.timeout_);
  }
  if (first.deadline_ && now >= *first.deadline_) {
    fail(ErrorKind::kComm, missed_deadline(first.what() + ": not done", first.timeout_));
  }
}

// Headers travel in any order, and asking for some moves all of them along, so those behind the first that have not
// come need no asking.
void OperationWatch::compare_headers() {
  while (agreed_ < operations_.size()) {
    const std::shared_ptr<Operation> operation = operations_[agreed_];
    try {
      if (!headers_agree(*operation)) return;
    } catch (const Error& error) {
      fail(error.kind(), operation->what() + ": " + plain(error));
      return;
    }
    ++agreed_;
  }
}

void OperationWatch::complete_operations() {
  while (agreed_ > 0) {
    const std::shared_ptr<Operation> operation = operations_.front();
    if (!operation->issued_ || !operation->done()) return;
    operation->complete_ = true;
    operation->release();
    operations_.pop_front();
    --agreed_;
  }
}

}  // namespace annulus::nccl_internal
