// Writes a run's metrics.jsonl, and shows its progress line. Used by the trainer on rank 0, in part through
// runtime/training/run_report.h.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "common/clock.h"
#include "common/descriptor.h"

namespace annulus {

// Writes one JSON object per line, beginning with "step", and flushes each line. Not thread safe.
class MetricsWriter {
 public:
  // Numbers and Facts are objects, a Table is an object of objects of numbers.
  using Numbers = std::vector<std::pair<std::string_view, std::variant<int64_t, double>>>;
  using Table = std::vector<std::pair<std::string, Numbers>>;
  using Facts = std::vector<std::pair<std::string_view, std::variant<int64_t, double, bool, std::string>>>;
  using Value = std::variant<int64_t, double, std::string, std::vector<double>, Table, Facts>;
  using Fields = std::vector<std::pair<std::string_view, Value>>;

  // Opens the file for appending. With `resumed_step`, first removes (atomically) lines of later steps and an
  // incomplete last line. Raises Error(kResource) for I/O errors.
  explicit MetricsWriter(const std::string& path, std::optional<int64_t> resumed_step = std::nullopt);
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // Removes (atomically) lines of later steps, which the run will repeat. Raises Error(kResource) for I/O errors.
  void remove_after(int64_t step);
  // Writes a line. Infinity and NaN become null. Raises Error(kResource) for I/O errors, after which the file ends with
  // the line before, so that later ones may be written.
  void write(int64_t step, const Fields& fields);

 private:
  void open();

  std::string path_;
  std::optional<Descriptor> file_;
};

// The content of a progress line; unknown values are omitted.
struct ProgressReport {
  int64_t step = 0;
  int64_t steps = 0;
  double loss = 0;                             // nats per token
  std::optional<double> validation_loss = {};  // of the last validation
  bool of_bytes = true;                        // whether tokens are bytes; losses are then shown in bits per byte
  std::optional<double> tokens_per_second = {};
  std::optional<double> utilization = {};  // model FLOPs utilization (MFU), 0 to 1
  std::optional<double> seconds_left = {};
};

// Formats a progress line, for bytes or for other tokens:
// step 20/600  loss 2.08  3.00 bits per byte  validation 3.12 bits per byte  8,210 tokens/s  MFU 51.2%  4:10 left
// step 20/600  loss 2.08  validation 2.16  8,210 tokens/s  MFU 51.2%  4:10 left
// If it exceeds `columns` (0: unlimited), omits the validation, then the MFU, then the loss if bits per byte are shown,
// and truncates the rest.
std::string format_progress(const ProgressReport& report, int columns = 0);
std::string format_duration(double seconds);  // 250 -> "4:10", 3700 -> "1:01:40"
inline double bits_per_byte(double nats) { return nats * 1.4426950408889634; }

enum class ProgressMode { kLive, kPlain, kNone };

// Parses `environment`, the value of ANNULUS_PROGRESS (live, plain or none), which the launcher sets for its ranks
// because they have no terminal. Null or "": live if `terminal` (takes_escapes(), common/terminal.h), otherwise plain.
// Raises Error(kUsage) for another value.
ProgressMode progress_mode(const char* environment, bool terminal);

// Shows reports. Live mode has a line that every report overwrites, at most ten times a second, and above it the lines
// of the reports that stay. Plain mode prints a line from time to time, at most 10 s after the last one if reports are
// frequent enough. Lines have no colors. Not thread safe.
class Progress {
 public:
  // Why a report stays on a terminal.
  enum class Stays {
    kNo,
    kLogged,     // it has a line in metrics.jsonl, too
    kImportant,  // a new validation, the last step: in plain mode it is always shown as well
  };
  using Clock = std::function<double()>;  // monotonic, in seconds
  using Width = std::function<int()>;     // of the terminal now, in columns

  Progress(ProgressMode mode, std::ostream& out, Clock clock = steady_seconds, Width width = columns_of_output);
  ~Progress();  // ends a live line

  void report(const ProgressReport& report, Stays stays = Stays::kNo);
  // Prints a line that stays, above the live line.
  void message(std::string_view text);
  // Ends a live line, so that other output starts on a new one.
  void finish();

  static int columns_of_output();

 private:
  void show_line();
  // Replaces the live line by one that stays; there is no live line until the next report.
  void keep(std::string_view text);

  ProgressMode mode_;
  std::ostream& out_;
  Clock clock_;
  Width width_;
  std::string line_;     // the current live line; empty: none
  bool behind_ = false;  // whether the terminal shows an older one
  std::optional<double> shown_at_;
  std::optional<double> reported_at_;
};

}  // namespace annulus
