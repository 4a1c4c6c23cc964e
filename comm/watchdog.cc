// The thread that ends a process stuck in a call.
#include "comm/watchdog.h"

#include <unistd.h>

#include <utility>

#include "comm/deadline.h"
#include "common/error.h"

namespace annulus::comm_internal {

Watchdog::Watchdog(Seconds timeout, std::function<std::string()> message)
    : thread_([this, timeout, message = std::move(message)] {
        const auto deadline = deadline_of(timeout);
        std::unique_lock<std::mutex> lock(mutex_);
        if (wake_.wait_until(lock, deadline, [this] { return done_; })) return;
        const std::string text = message();
        if (!text.empty()) {
          const std::string line = text + "\n";
          [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
        }
        _exit(static_cast<int>(ErrorKind::kComm));
      }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

}  // namespace annulus::comm_internal
