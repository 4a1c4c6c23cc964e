// The operations that are under way on a device, and the thread that watches them for asynchronous errors of NCCL, for
// headers that differ, for completion and for deadlines. It uses neither CUDA nor NCCL: these and the clock are behind
// interfaces, so that a test can inject any behaviour of a device (tests/comm/nccl_watch_test.cc). Used by
// nccl_communicator.cc.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "comm/deadline.h"
#include "comm/nccl/message_headers.h"
#include "common/error.h"

namespace annulus::nccl_internal {

using comm_internal::Clock;

// The message of an error of any kind for use within another message of this package. LibTorch's errors end in advice
// for programmers and a backtrace, which are left out.
std::string in_short(const std::exception& error);

// One exchange or collective, until it is known to be complete.
class Operation {
 public:
  // label: "attention forward, hop 2"; description: "receiving 4096 bytes from rank 3".
  Operation(std::string label, std::string description, Seconds timeout)
      : label_(std::move(label)), description_(std::move(description)), timeout_(timeout) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  const std::string& label() const { return label_; }
  std::string what() const { return label_ + ": " + description_; }
  Seconds timeout() const { return timeout_; }

  // Whether the operation has been issued completely. reached() and done() are only valid then.
  bool issued() const { return issued_; }
  void set_issued() { issued_ = true; }
  bool complete() const { return complete_; }

 protected:
  // The result so far of comparing its headers. Raises Error(kComm) if they cannot come.
  virtual HeaderResult headers() = 0;
  // Whether the device has reached it.
  virtual bool reached() = 0;
  // Whether the device is done with it. Raises an error with CUDA's words if the device has failed.
  virtual bool done() = 0;
  // Called when it is complete: frees what it kept alive.
  virtual void release() = 0;

 private:
  friend class OperationWatch;
  std::string label_, description_;
  Seconds timeout_;
  // Set when the device reaches the operation, because the host may have issued much work before it.
  std::optional<Clock::time_point> deadline_;
  bool issued_ = false;
  bool complete_ = false;
};

// The functions of NCCL that the watch uses.
class Transport {
 public:
  virtual ~Transport() = default;
  // NCCL's asynchronous error; empty without one.
  virtual std::string error() = 0;
  // Ends the operations that run on the device. The transport cannot be used afterwards. `why` is the failure, for the
  // case that aborting fails as well.
  virtual void abort(const std::string& why) = 0;
  // Whether the calling thread captures a CUDA graph, which a query of the device would invalidate. False if the device
  // has failed: the queries that follow find the failure and name the operation.
  virtual bool capturing() const = 0;
};

class WatchClock {
 public:
  virtual ~WatchClock() = default;
  virtual Clock::time_point now() = 0;
  virtual void sleep(Clock::duration duration) = 0;
};

// The machine's clock.
WatchClock& real_clock();

class OperationWatch {
 public:
  // How long to wait for headers after an error of NCCL. If none differ by then, the error is not due to a mismatch.
  static constexpr auto kHeadersBehind = std::chrono::milliseconds(500);
  static constexpr auto kInterval = std::chrono::milliseconds(20);

  // device: who failed, in messages about a failure of the device: "the device of rank 3".
  OperationWatch(Transport& transport, std::string device, WatchClock& clock = real_clock())
      : transport_(transport), device_(std::move(device)), clock_(clock) {}
  ~OperationWatch() { stop(); }

  // Starts the thread. It calls `begin` first, and then check() every kInterval while operations are under way.
  // Whatever is thrown in the thread becomes a failure().
  void start(std::function<void()> begin);
  void stop();

  const std::string& device() const { return device_; }

  // Guards the transport and all members below. The caller of these functions holds it.
  std::mutex& mutex() { return mutex_; }

  // Add operations in the order of issue, each before it is issued. The device completes them in that order. Call
  // wake() after issuing it, so that the thread watches it.
  void add(std::shared_ptr<Operation> operation) { operations_.push_back(std::move(operation)); }
  void wake() { wake_.notify_all(); }

  // Checks what is under way, once. Asks the device only up to the first operation that is not done, and for headers
  // only up to the first that have not come, so a call costs the same however many operations are under way. Does not
  // throw: what goes wrong becomes a failure().
  void check();

  struct Failure {
    ErrorKind kind;
    std::string text;
  };
  // Why operations fail from now on; empty without a failure. The first reason is kept.
  const std::optional<Failure>& failure() const { return failure_; }
  // Aborts the transport. Operations that are not complete are never freed, and their memory is not reused.
  void fail(ErrorKind kind, const std::string& text);
  // The same for a failure of the device that was met at `what`, an operation or its label: "WHAT: the device of rank 3
  // failed: REASON".
  void fail_device(const std::string& what, const std::string& reason);
  // The same after a call of NCCL has failed. Some transports of NCCL fail because of a message of another size, and
  // the headers describe that better, so this waits for them, at most kHeadersBehind.
  void fail_unless_headers_explain(ErrorKind kind, const std::string& text);

 private:
  bool headers_may_explain();
  bool headers_agree(Operation& operation);
  void compare_headers();
  void complete_operations();
  void check_once();
  void run(const std::function<void()>& begin);

  Transport& transport_;
  std::string device_;
  WatchClock& clock_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Operation>> operations_;
  size_t agreed_ = 0;  // how many of the first operations have headers that agree
  std::optional<Failure> failure_;
  std::optional<Clock::time_point> broken_since_;  // when NCCL first reported an error
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace annulus::nccl_internal
