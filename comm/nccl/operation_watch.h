// What is under way on a device, and the thread that looks after it: asynchronous errors of NCCL, headers that differ,
// completion, deadlines. Knows neither CUDA nor NCCL: what it asks of them, and the clock, are interfaces, so that a
// test injects whatever a device may answer (tests/comm/nccl_watch_test.cc). Used by nccl_communicator.cc.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/deadline.h"
#include "comm/nccl/message_headers.h"
#include "common/error.h"

namespace annulus::nccl_internal {

using comm_internal::Clock;

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

  // Whether it has been issued to the end: only then do reached() and done() mean anything.
  bool issued() const { return issued_; }
  void set_issued() { issued_ = true; }
  bool complete() const { return complete_; }

 protected:
  // What its messages' headers say. Raises Error(kComm) when they cannot come.
  virtual HeaderVerdict headers() = 0;
  // Whether the device has got to it.
  virtual bool reached() = 0;
  // Whether the device is done with it. Raises Error(kComm) when the device has failed.
  virtual bool done() = 0;
  // It is complete: what it kept alive is no longer needed.
  virtual void release() = 0;

 private:
  friend class OperationWatch;
  std::string label_, description_;
  Seconds timeout_;
  // From when the device gets to it: the host may have issued hours of work before it.
  std::optional<Clock::time_point> deadline_;
  bool issued_ = false;
  bool complete_ = false;
};

// What the watch asks of NCCL as a whole.
class Transport {
 public:
  virtual ~Transport() = default;
  // What NCCL has failed with by itself; empty while all is well.
  virtual std::string error() = 0;
  // Ends what runs on the device, and this transport with it.
  virtual void abort() = 0;
  // Whether the calling thread captures a CUDA graph, which a look at the device would spoil.
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
  // How long headers may be behind an error of NCCL before it is believed to be no mismatch.
  static constexpr auto kHeadersBehind = std::chrono::milliseconds(500);
  static constexpr auto kInterval = std::chrono::milliseconds(20);

  explicit OperationWatch(Transport& transport, WatchClock& clock = real_clock())
      : transport_(transport), clock_(clock) {}
  ~OperationWatch() { stop(); }

  // Starts the thread, which calls `begin` first and looks every kInterval while anything is under way.
  void start(std::function<void()> begin);
  void stop();

  // Guards the transport and all that follows.
  std::mutex& mutex() { return mutex_; }

  // Operations are added in the order of issue, each before it is issued. wake() when it has been: the thread looks.
  void add(std::shared_ptr<Operation> operation) { operations_.push_back(std::move(operation)); }
  void wake() { wake_.notify_all(); }

  // One look at everything under way.
  void look();

  struct Failure {
    ErrorKind kind;
    std::string text;
  };
  // Why nothing is carried any more. The first reason stays.
  const std::optional<Failure>& failure() const { return failure_; }
  // Aborts the transport. Operations that are not complete are neither freed nor is their memory reused.
  void fail(ErrorKind kind, const std::string& text);
  // The same where a call of NCCL has failed: a message of another size breaks some transports of NCCL, too, and the
  // headers say it better. They are waited for, for kHeadersBehind at most.
  void fail_unless_headers_explain(ErrorKind kind, const std::string& text);

 private:
  bool headers_may_explain();
  bool headers_agree(Operation& operation);
  void run(const std::function<void()>& begin);

  Transport& transport_;
  WatchClock& clock_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<std::shared_ptr<Operation>> operations_;
  std::optional<Failure> failure_;
  std::optional<Clock::time_point> broken_since_;  // when NCCL first reported an error
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace annulus::nccl_internal
