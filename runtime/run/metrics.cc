// See metrics.h.
#include "runtime/run/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/terminal.h"
#include "common/text.h"

namespace annulus {
namespace {

// The longest time between two plain lines if reports are frequent enough.
constexpr double kPlainSeconds = 10;
// The shortest time between two live lines.
constexpr double kLiveSeconds = 0.1;

// Keeps only whole lines of steps up to `last`. The others are of steps after the checkpoint from which the run now
// resumes, or were being written when the run was interrupted.
void truncate_after(const std::string& path, int64_t last) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return;
  std::string kept;
  bool removed = false;
  for (std::string line; std::getline(in, line);) {
    const bool whole = !in.eof();
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool good = whole && json.is_object() && json.contains("step") && json["step"].is_number_integer() &&
                      json["step"].get<int64_t>() <= last;
    if (good) {
      kept += line + "\n";
    } else {
      removed = true;
    }
  }
  if (removed) write_atomically(FileSystem::real(), path, kept);
}

template <typename Plain>
nlohmann::ordered_json to_json(const Plain& value) {
  return value;  // nlohmann writes numbers that JSON lacks as null
}

// An object of what `to_json` or nlohmann can convert.
template <typename Name, typename... Values>
nlohmann::ordered_json to_json(const std::vector<std::pair<Name, std::variant<Values...>>>& members) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const auto& [name, value] : members) {
    std::visit([&, key = std::string(name)](const auto& known) { object[key] = known; }, value);
  }
  return object;
}

nlohmann::ordered_json to_json(const MetricsWriter::Table& table) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const auto& [row, numbers] : table) object[row] = to_json(numbers);
  return object;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::string& path, std::optional<int64_t> resumed_step) : path_(path) {
  if (resumed_step) truncate_after(path, *resumed_step);
  open();
}

void MetricsWriter::open() {
  file_.emplace(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (*file_ < 0) throw Error(ErrorKind::kResource, "metrics", "cannot open " + path_ + ": " + std::strerror(errno));
}

void MetricsWriter::remove_after(int64_t step) {
  file_.reset();
  truncate_after(path_, step);
  open();
}

void MetricsWriter::write(int64_t step, const Fields& fields) {
  nlohmann::ordered_json line;
  line["step"] = step;
  for (const auto& [name, value] : fields) {
    line[std::string(name)] = std::visit([](const auto& known) { return to_json(known); }, value);
  }
  const std::string text = line.dump() + "\n";
  const off_t before = lseek(*file_, 0, SEEK_END);
  const int error = write_fully(*file_, text);
  if (error == 0) return;
  // A part of the line would be read together with the next one. What has no length, such as /dev/full, has no part.
  if (before >= 0 && ftruncate(*file_, before) != 0 && errno != EINVAL) {
    throw Error(ErrorKind::kResource, "metrics",
                "cannot remove a part of a line from " + path_ + ": " + std::strerror(errno));
  }
  throw Error(ErrorKind::kResource, "metrics", "cannot write " + path_ + ": " + writing_error_text(error));
}

std::string format_duration(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(std::clamp(seconds, 0.0, 1e12)));
  char text[64];
  if (s < 3600) {
    std::snprintf(text, sizeof text, "%d:%02d", static_cast<int>(s / 60), static_cast<int>(s % 60));
  } else {
    std::snprintf(text, sizeof text, "%lld:%02d:%02d", static_cast<long long>(s / 3600), static_cast<int>(s / 60 % 60),
                  static_cast<int>(s % 60));
  }
  return text;
}

std::string format_progress(const ProgressReport& r, int columns) {
  const auto known = [](const std::optional<double>& v) { return v && std::isfinite(*v); };
  const auto shown = [&](double nats) {
    return r.of_bytes ? rounded(bits_per_byte(nats), 2) + " bits per byte" : rounded(nats, 2);
  };
  std::string loss = "  loss " + rounded(r.loss, 2), validation, utilization;
  if (r.validation_loss) validation = "  validation " + shown(*r.validation_loss);
  if (known(r.utilization)) {
    utilization = "  MFU " + rounded(100 * *r.utilization, 1) + " %";
  }
  const auto line = [&] {
    std::string text = "step " + with_commas(r.step) + "/" + with_commas(r.steps) + loss +
                       (r.of_bytes ? "  " + shown(r.loss) : "") + validation;
    if (known(r.tokens_per_second)) {
      text += "  " + with_commas(std::llround(std::clamp(*r.tokens_per_second, 0.0, 1e15))) + " tokens/s";
    }
    text += utilization;
    if (known(r.seconds_left)) text += "  " + format_duration(*r.seconds_left) + " left";
    return text;
  };
  std::string text = line();
  if (columns <= 0) return text;
  const auto room = static_cast<size_t>(columns);  // its characters are all ASCII
  for (std::string* part : {&validation, &utilization, &loss}) {
    if (text.size() <= room || (part == &loss && !r.of_bytes)) break;
    part->clear();
    text = line();
  }
  return text.substr(0, room);
}

ProgressMode progress_mode(const char* environment, bool terminal) {
  const std::string_view asked = environment ? environment : "";
  if (asked.empty()) return terminal ? ProgressMode::kLive : ProgressMode::kPlain;
  if (asked == "live") return ProgressMode::kLive;
  if (asked == "plain") return ProgressMode::kPlain;
  if (asked == "none") return ProgressMode::kNone;
  throw Error(ErrorKind::kUsage, "metrics",
              "ANNULUS_PROGRESS: expected live, plain or none, got \"" + std::string(asked) + "\"");
}

Progress::Progress(ProgressMode mode, std::ostream& out, Clock clock, Width width)
    : mode_(mode), out_(out), clock_(std::move(clock)), width_(std::move(width)) {}

Progress::~Progress() { finish(); }

int Progress::columns_of_output() { return terminal_columns(STDOUT_FILENO); }

void Progress::report(const ProgressReport& report, Stays stays) {
  if (mode_ == ProgressMode::kNone) return;
  const double now = clock_();
  if (mode_ == ProgressMode::kLive) {
    // One column stays free, because many terminals move to the next line once the last column is written.
    line_ = format_progress(report, std::max(1, width_() - 1));
    if (stays != Stays::kNo) return keep(std::exchange(line_, ""));
    behind_ = shown_at_ && now - *shown_at_ < kLiveSeconds;
    if (behind_) return;
    shown_at_ = now;
    show_line();
    return;
  }
  const std::string line = format_progress(report);
  // The report is shown now if the next one would be too late, assuming that it takes as long as this one did.
  const bool due = !shown_at_ || now + (now - *reported_at_) - *shown_at_ > kPlainSeconds;
  reported_at_ = now;
  if (!due && stays != Stays::kImportant) return;
  out_ << line << '\n' << std::flush;
  shown_at_ = now;
}

void Progress::message(std::string_view text) {
  if (mode_ == ProgressMode::kLive && !line_.empty()) {
    keep(text);
    show_line();
    return;
  }
  out_ << text << '\n' << std::flush;
}

void Progress::keep(std::string_view text) {
  behind_ = false;
  out_ << '\r' << text << "\x1b[K\n" << std::flush;
}

// Moves to the left edge, prints the line, and erases the rest of a longer old one. Wrapping is off meanwhile, so that
// a terminal that has become narrower cuts the line.
void Progress::show_line() { out_ << "\r\x1b[?7l" << line_ << "\x1b[K\x1b[?7h" << std::flush; }

void Progress::finish() {
  if (line_.empty()) return;
  if (behind_) show_line();
  behind_ = false;
  out_ << '\n' << std::flush;
  line_.clear();
}

}  // namespace annulus
