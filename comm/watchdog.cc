// See watchdog.h.
#include "comm/watchdog.h"

#include <unistd.h>

#include <utility>

#include "comm/deadline.h"
#include "common/error.h"

namespace annulus::comm_internal {

Watchdog::Watchdog(Seconds timeout, std::function<std::optional<std::string>()> message)
    : thread_([this, timeout, message = std::move(message)] {
        std::unique_lock<std::mutex> lock(mutex_);
        std::optional<std::string> text;
        while (!text) {
          if (wake_.wait_until(lock, deadline_of(timeout), [this] { return done_; })) return;
          text = message();
        }
        if (!text->empty()) {
          const std::string line = *text + "\n";
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
