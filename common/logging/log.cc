// See log.h and log_setup.h.
#include "common/logging/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/logging/log_setup.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr size_t kLongestMessage = 64 << 10;
constexpr size_t kMostEarly = 1000;  // records that are kept until a file is opened
constexpr size_t kMostEarlyBytes = 1 << 20;
constexpr std::chrono::seconds kLastWait{1};

std::atomic<LogLevel> wanted{LogLevel::kInfo};
std::atomic<bool> in_json{false};

// One write if possible, so that lines of several processes and threads do not mix.
void write_to_stderr(const LogRecord& record) {
  const std::string line = (in_json ? json_text(record) : plain_text(record)) + "\n";
  write_fully(STDERR_FILENO, line);
}

struct Place {
  std::string host;
  int rank = kNoRank;
  int world = 0;
};

struct Log {
  std::timed_mutex mutex;
  std::mutex place_mutex;  // held only to copy, so that log_last_words need not wait for `mutex`
  Place current;
  LogConsole console;
  std::unique_ptr<LogBackend> backend;
  std::deque<LogRecord> early;
  size_t early_bytes = 0;
  bool opened = false;  // whether early records are no longer kept

  Place place() {
    const std::lock_guard<std::mutex> lock(place_mutex);
    return current;
  }

  void print(const LogRecord& record, bool shown) const {
    if (console) {
      console(record, shown);
    } else if (shown) {
      write_to_stderr(record);
    }
  }

  void take(const LogRecord& record, bool shown) {
    if (backend) {
      backend->take(record, shown, [this](const LogRecord& taken, bool seen) { print(taken, seen); });
      const size_t bytes = sizeof record + record.message.size();
      if (opened || early.size() >= kMostEarly || early_bytes + bytes > kMostEarlyBytes) return;
      early.push_back(record);
      early_bytes += bytes;
    } else {
      print(record, shown);
    }
  }
};

// It is never destroyed, because destructors of static objects may log.
Log& the_log() {
  static Log* const log = new Log;
  return *log;
}

LogRecord make_record(LogLevel level, std::string_view module, std::string_view message) {
  const Place place = the_log().place();
  return {.time = std::chrono::system_clock::now(),
          .level = level,
          .host = place.host,
          .rank = place.rank,
          .module = std::string(module),
          .message = std::string(message.substr(0, kLongestMessage)),
          .of_one = place.world != 1};
}

void take(LogRecord record, bool shown = true) {
  Log& log = the_log();
  const std::lock_guard<std::timed_mutex> lock(log.mutex);
  record.time = std::chrono::system_clock::now();  // so that records are in the order of their times
  log.take(record, shown);
}

}  // namespace

bool log_enabled(LogLevel level) { return level >= wanted; }

void log(LogLevel level, std::string_view module, std::string_view message) {
  if (log_enabled(level)) take(make_record(level, module, message));
}

void log_error(const std::exception& error, int rank) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  LogRecord record = make_record(LogLevel::kError, ours != nullptr ? ours->module() : "",
                                 ours != nullptr ? ours->message() : std::string_view(error.what()));
  if (rank != kNoRank) record.rank = rank;
  take(record);
}

void log_warn_once_per_job(std::string_view module, std::string_view message) {
  if (the_log().place().rank <= 0) log_warn(module, message);
}

void log_last_words(LogLevel level, std::string_view module, std::string_view message, LastWords words) {
  if (!log_enabled(level)) return;
  Log& log = the_log();
  LogRecord record = make_record(level, module, message);
  if (words.rank != kNoRank) record.rank = words.rank;
  if (words.of_all) record.of_one = false;
  const std::unique_lock<std::timed_mutex> lock(log.mutex, kLastWait);
  if (lock) {
    log.take(record, /*shown=*/true);
  } else {
    write_to_stderr(record);
  }
}

void log_error_for_all(std::string_view module, std::string_view message) {
  LogRecord record = make_record(LogLevel::kError, module, message);
  record.of_one = false;
  take(record);
}

void log_unshown(LogLevel level, std::string_view module, std::string_view message) {
  if (log_enabled(level)) take(make_record(level, module, message), /*shown=*/false);
}

LogLevel parse_log_level(std::string_view text, std::string_view where) {
  return static_cast<LogLevel>(index_of_name(text, level_names(), "level", where));
}

LogSettings parse_log_settings(std::string_view text, std::string_view where, LogSettings base) {
  std::vector<std::string> known = level_names();
  known.emplace_back("json");
  for (const std::string& word : split(text, ',')) {
    const size_t index = index_of_name(word, known, "word", where);
    if (index < level_names().size()) {
      base.level = static_cast<LogLevel>(index);
    } else {
      base.json = true;
    }
  }
  return base;
}

std::string log_settings_text(const LogSettings& settings) {
  return std::string(level_name(settings.level)) + (settings.json ? ",json" : "");
}

LogSettings log_settings() { return {wanted, in_json}; }

void set_log_settings(const LogSettings& settings) {
  wanted = settings.level;
  in_json = settings.json;
}

void set_log_place(const std::string& host, int rank, int world) {
  Log& log = the_log();
  const std::lock_guard<std::mutex> lock(log.place_mutex);
  log.current = {host, rank, world};
}

void set_log_console(LogConsole console) {
  Log& log = the_log();
  const std::lock_guard<std::timed_mutex> lock(log.mutex);
  log.console = std::move(console);
}

void set_log_backend(std::unique_ptr<LogBackend> backend) {
  Log& log = the_log();
  const std::lock_guard<std::timed_mutex> lock(log.mutex);
  log.backend = std::move(backend);
  log.early.clear();
  log.early_bytes = 0;
  log.opened = false;
}

void open_log_file(const std::string& path, int64_t bytes) {
  Log& log = the_log();
  const std::lock_guard<std::timed_mutex> lock(log.mutex);
  if (!log.backend) return;
  log.opened = true;
  const std::string why = log.backend->open_file(path, bytes);
  const std::deque<LogRecord> early = std::exchange(log.early, {});
  if (why.empty()) {
    const LogConsole nobody = [](const LogRecord&, bool) {};
    for (const LogRecord& record : early) log.backend->take(record, /*shown=*/false, nobody);
  } else {
    log.take(make_record(LogLevel::kWarn, "log", "this rank has no log file: " + why), /*shown=*/true);
  }
}

std::vector<LogRecord> take_early_records() {
  Log& log = the_log();
  const std::lock_guard<std::timed_mutex> lock(log.mutex);
  log.opened = true;
  const std::deque<LogRecord> early = std::exchange(log.early, {});
  return {early.begin(), early.end()};
}

}  // namespace annulus
