// See logger.h. This is the only file that includes spdlog, and it includes few of its headers, because they take
// seconds to compile.
#include "common/logging/logger.h"

#include <spdlog/details/null_mutex.h>
#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/rotating_file_sink.h>

#include <array>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "common/logging/log_setup.h"

namespace annulus {
namespace {

constexpr size_t kOlderFiles = 1;

// The record that is being written. spdlog's messages lack some of its fields, so the sinks read them here. Only one
// record is written at a time (log.cc holds a lock).
struct Current {
  const LogRecord* record = nullptr;
  bool shown = false;
  const LogConsole* console = nullptr;
};

// Formats the record as a line of the file, instead of by one of spdlog's patterns.
class RecordFormatter : public spdlog::formatter {
 public:
  explicit RecordFormatter(const Current& current) : current_(current) {}
  void format(const spdlog::details::log_msg&, spdlog::memory_buf_t& line) override {
    const std::string text = (log_settings().json ? json_text(*current_.record) : file_text(*current_.record)) + "\n";
    line.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<RecordFormatter>(current_); }

 private:
  const Current& current_;
};

class ConsoleSink : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit ConsoleSink(const Current& current) : current_(current) {}

 protected:
  void sink_it_(const spdlog::details::log_msg&) override { (*current_.console)(*current_.record, current_.shown); }
  void flush_() override {}

 private:
  const Current& current_;
};

spdlog::level::level_enum level_of(LogLevel level) {
  constexpr std::array levels = {spdlog::level::debug, spdlog::level::info, spdlog::level::warn, spdlog::level::err};
  return levels[static_cast<size_t>(level)];
}

class Logger : public LogBackend {
 public:
  Logger() : logger_("annulus", std::make_shared<ConsoleSink>(current_)) {
    logger_.set_level(spdlog::level::trace);  // log.cc has already filtered by level
    logger_.flush_on(spdlog::level::trace);   // so that a killed process loses no record
    logger_.set_error_handler([this](const std::string& why) {
      if (failure_.empty()) failure_ = why;
    });
  }

  void take(const LogRecord& record, bool shown, const LogConsole& console) override {
    current_ = {&record, shown, &console};
    logger_.log(record.time, spdlog::source_loc{}, level_of(record.level), spdlog::string_view_t(record.message));
    if (failure_.empty() || told_) return;
    told_ = true;  // a job does not fail because of its logs
    LogRecord lost = record;
    lost.level = LogLevel::kWarn;
    lost.module = "log";
    lost.message = "lines are missing in the log file " + path_ + ": " + failure_;
    console(lost, /*shown=*/true);
  }

  std::string open_file(const std::string& path, int64_t bytes) override {
    logger_.sinks().resize(1);
    path_ = path;
    if (path.empty()) return "";
    try {
      auto file = std::make_shared<spdlog::sinks::rotating_file_sink_st>(path, bytes, kOlderFiles);
      file->set_formatter(std::make_unique<RecordFormatter>(current_));
      logger_.sinks().push_back(std::move(file));
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

 private:
  Current current_;
  spdlog::logger logger_;
  std::string path_, failure_;
  bool told_ = false;
};

}  // namespace

void install_logger() { set_log_backend(std::make_unique<Logger>()); }

}  // namespace annulus
