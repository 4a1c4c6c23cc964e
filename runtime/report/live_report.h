// Writes the report of a run that goes on, again and again, on a thread of its own, so that a browser's reload shows
// the run as it is. Used by `annulus train --report` on rank 0.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/report/run_data.h"

namespace annulus {

// How often a page is written.
struct ReportPace {
  double first = 1, least = 10;  // seconds until the first page, and at least from one to the next
  double share = 0.01;           // of a processor, at most
};

// Reads what the run has written to its folder, and so takes nothing of the training but a share of a processor: at
// most one hundredth of one, because it waits for a hundred times as long as the last page took, and at least for 10 s.
// A page that cannot be written is a warning (once), never an error of the run.
class LiveReport {
 public:
  // `run`: its folder. Writes RUN/report.html. `pace` is for tests.
  explicit LiveReport(std::string run, ReportPace pace = {});
  // Writes the last page.
  ~LiveReport();
  LiveReport(const LiveReport&) = delete;
  LiveReport& operator=(const LiveReport&) = delete;

  // Says that the run has failed, for the last page. Thread safe.
  void failed(const std::string& error);

 private:
  // Whether a step has been logged, so that there is something to show.
  bool has_metrics() const;
  void write_pages();
  void write(const RunNow& now, double again);

  std::string run_;
  const ReportPace pace_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;  // guarded by mutex_, as the error
  std::string error_;
  bool warned_ = false;
  std::thread thread_;
};

// The path of a run's report.
inline std::string report_path(const std::string& run) { return run + "/report.html"; }

}  // namespace annulus
