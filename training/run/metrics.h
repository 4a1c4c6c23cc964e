// What a run reports: metrics.jsonl for programs, one progress line for people. Used by trainer.cc on rank 0.
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

// One JSON object a line, "step" first, flushed line by line. Not thread-safe.
class MetricsWriter {
 public:
  // An object of objects of numbers.
  using Numbers = std::vector<std::pair<std::string_view, std::variant<int64_t, double>>>;
  using Table = std::vector<std::pair<std::string, Numbers>>;
  using Fields = std::vector<std::pair<std::string_view, std::variant<int64_t, double, Table>>>;

  // Appends. With `resumed_step`, lines of later steps and a half-written last line are removed first (atomically).
  // Raises Error(kResource).
  explicit MetricsWriter(const std::string& path, std::optional<int64_t> resumed_step = std::nullopt);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // Removes lines of later steps, which are made again (atomically). Raises Error(kResource).
  void remove_after(int64_t step);
  // Numbers that JSON lacks (infinity, not a number) become null. Raises Error(kResource) when the disk is full.
  void write(int64_t step, const Fields& fields);

 private:
  void open();

  std::string path_;
  std::FILE* file_ = nullptr;
};

// What a progress line says; what is not known is left out.
struct ProgressReport {
  int64_t step = 0;
  int64_t steps = 0;
  double loss = 0;                             // nats per token
  std::optional<double> validation_loss = {};  // of the last validation
  bool of_bytes = true;                        // a token is a byte: losses are shown in bits per byte
  std::optional<double> tokens_per_second = {};
  std::optional<double> utilization = {};  // of the devices' peak, by the model's FLOPs
  std::optional<double> seconds_left = {};
};

// step 20/600  loss 2.08  3.00 bits per byte  validation 3.12 bits per byte  8,210 tokens/s  MFU 51.2%  4:10 left
// step 20/600  loss 2.08  validation 2.16  8,210 tokens/s  MFU 51.2%  4:10 left
// Where `columns` (0: any number) are too few, it goes without the validation, then without MFU, then without the loss
// where bits per byte say the same, and what is still too long is cut.
std::string format_progress(const ProgressReport& report, int columns = 0);
std::string format_duration(double seconds);  // 250 -> "4:10", 3700 -> "1:01:40"
inline double bits_per_byte(double nats) { return nats * 1.4426950408889634; }

enum class ProgressMode { kLive, kPlain, kNone };

// ANNULUS_PROGRESS=live|plain|none where it is set (the launcher does: ranks have no terminal), else live on a terminal
// that takes escapes (common/terminal.h) and plain elsewhere. Raises Error(kUsage) for another value.
ProgressMode progress_mode(const char* environment, bool terminal);

// Shows reports: live, one line that is written over; plain, a line now and then, no more than 10 s apart as long as
// reports come that often. Not thread-safe.
class Progress {
 public:
  using Clock = std::function<double()>;  // seconds, never going back
  using Width = std::function<int()>;     // of the terminal now, in columns

  Progress(ProgressMode mode, std::ostream& out, Clock clock = steady_seconds, Width width = columns_of_output);
  ~Progress();  // ends a live line

  // `important`: shown in plain mode even if the last line is recent (a new validation, the last step).
  void report(const ProgressReport& report, bool important = false);
  // A line of its own that stays: above the live line.
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
