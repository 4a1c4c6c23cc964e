// See live_report.h.
#include "runtime/report/live_report.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/clock.h"
#include "common/files.h"
#include "common/logging/log.h"
#include "runtime/report/report_page.h"

namespace annulus {

LiveReport::LiveReport(std::string run, ReportPace pace) : run_(std::move(run)), pace_(pace) {
  try {
    thread_ = std::thread([this] { write_pages(); });
  } catch (const std::system_error& fault) {
    log_warn("report",
             "the report is written at the end only: no thread could be started: " + std::string(fault.what()));
  }
}

LiveReport::~LiveReport() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (has_metrics()) write({.running = false, .error = error_}, 0);
}

void LiveReport::failed(const std::string& error) {
  const std::lock_guard lock(mutex_);
  error_ = error;
}

void LiveReport::write_pages() {
  double wait = pace_.first;
  for (;;) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::duration<double>(wait), [&] { return ending_; })) return;
    lock.unlock();
    const double begin = steady_seconds();
    if (!has_metrics()) continue;
    write({.running = true, .error = {}}, std::max(wait, pace_.least));
    wait = std::max(pace_.least, (steady_seconds() - begin) / pace_.share);
  }
}

bool LiveReport::has_metrics() const {
  std::error_code error;
  return std::filesystem::file_size(run_ + "/metrics.jsonl", error) > 0 && !error;
}

void LiveReport::write(const RunNow& now, double again) {
  try {
    write_atomically(FileSystem::real(), report_path(run_), report_page({run_data(run_, now)}, again));
  } catch (const std::exception& fault) {
    if (!std::exchange(warned_, true)) log_warn("report", "the report was not written: " + std::string(fault.what()));
  }
}

}  // namespace annulus
