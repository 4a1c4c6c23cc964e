// Writes what a run reports: metrics.jsonl for programs, and a progress line for people. The trainer uses it on rank 0,
// in part through runtime/training/run_report.h.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace annulus {

// Writes one JSON object on each line, with "step" first, and flushes each line. Not thread-safe.
class MetricsWriter {
 public:
  // A Table is an object of objects of numbers.
  using Numbers = std::vector<std::pair<std::string_view, std::variant<int64_t, double>>>;
  using Table = std::vector<std::pair<std::string, Numbers>>;
  using Fields = std::vector<std::pair<std::string_view, std::variant<int64_t, double, Table>>>;

  // Opens the file to append to it. With `resumed_step`, lines of later steps and an incomplete last line are removed
  // first (atomically). Raises Error(kResource).
  explicit MetricsWriter(const std::string& path, std::optional<int64_t> resumed_step = std::nullopt);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // Removes lines of later steps, which the run will repeat (atomically). Raises Error(kResource).
  void remove_after(int64_t step);
  // Writes a line. Numbers that JSON lacks (infinity, NaN) become null. Raises Error(kResource) if the disk is full.
  void write(int64_t step, const Fields& fields);

 private:
  void open();

  std::string path_;
  std::FILE* file_ = nullptr;
};

// The content of a progress line; what is not known is left out.
struct ProgressReport {
  int64_t step = 0;
  int64_t steps = 0;
  double loss = 0;                             // nats per token
  std::optional<double> validation_loss = {};  // of the last validation
  bool of_bytes = true;                        // whether a token is a byte; losses are then shown in bits per byte
  std::optional<double> tokens_per_second = {};
  std::optional<double> utilization = {};  // model FLOPs as a share of the devices' peak, 0 to 1
  std::optional<double> seconds_left = {};
};

// Returns, for bytes and for other tokens,
// step 20/600  loss 2.08  3.00 bits per byte  validation 3.12 bits per byte  8,210 tokens/s  MFU 51.2%  4:10 left
// step 20/600  loss 2.08  validation 2.16  8,210 tokens/s  MFU 51.2%  4:10 left
// If that is longer than `columns` (0: any length), it leaves out the validation, then the MFU, then the loss if bits
// per byte say the same, and cuts what is still too long.
std::string format_progress(const ProgressReport& report, int columns = 0);
std::string format_duration(double seconds);  // 250 -> "4:10", 3700 -> "1:01:40"
inline double bits_per_byte(double nats) { return nats * 1.4426950408889634; }

enum class ProgressMode { kLive, kPlain, kNone };

// Returns the value of ANNULUS_PROGRESS (live, plain or none) if it is set, as the launcher does because ranks have no
// terminal. Otherwise it is live on a terminal that understands escapes (common/terminal.h) and plain elsewhere. Raises
// Error(kUsage) for another value.
ProgressMode progress_mode(const char* environment, bool terminal);

// Shows reports. In live mode one line is overwritten; in plain mode a line is printed from time to time, at most 10 s
// after the last one if reports are frequent enough. Not thread-safe.
class Progress {
 public:
  using Clock = std::function<double()>;  // returns seconds; never goes back
  using Width = std::function<int()>;     // returns the current width of the terminal in columns

  Progress(ProgressMode mode, std::ostream& out, Clock clock = steady_seconds, Width width = columns_of_output);
  ~Progress();  // ends a live line

  // An `important` report (a new validation, the last step) is shown in plain mode even if the last line is recent.
  void report(const ProgressReport& report, bool important = false);
  // Prints a separate line that stays, above the live line.
  void message(std::string_view text);
  // Ends a live line so that other output starts on a new one.
  void finish();

  static double steady_seconds();
  static int columns_of_output();

 private:
  void show_line();

  ProgressMode mode_;
  std::ostream& out_;
  Clock clock_;
  Width width_;
  std::string line_;  // the live line now shown
  std::optional<double> shown_at_;
  std::optional<double> reported_at_;
};

}  // namespace annulus
