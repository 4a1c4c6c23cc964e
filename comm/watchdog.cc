// See watchdog.h.
#include "comm/watchdog.h"

#include <unistd.h>

#include <utility>

#include "comm/deadline.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/trace/last_operations.h"
#include "common/trace/recorder.h"

namespace annulus::comm_internal {

Watchdog::Watchdog(Seconds timeout, std::function<std::optional<std::string>()> message, int rank)
    : thread_([this, timeout, rank, message = std::move(message)] {
        std::unique_lock<std::mutex> lock(mutex_);
        std::optional<std::string> text;
        while (!text) {
          if (wake_.wait_until(lock, Deadline(timeout).time, [this] { return done_; })) return;
          text = message();
        }
        const std::string saved = save_last_operations(rank < 0 ? trace_rank() : rank, *text);
        if (!saved.empty() && !text->empty()) *text += "; the last operations of this rank are in " + saved;
        if (!text->empty()) log_last_words(LogLevel::kError, "comm", *text, {.rank = rank});
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
