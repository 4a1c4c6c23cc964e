// See run_log.h.
#include "runtime/report/run_log.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>

#include "common/text.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostBytes = 1 << 20;  // of the end of a file that are read
constexpr size_t kMostFiles = 256;
constexpr size_t kMostEntries = 200;
constexpr size_t kMostMessage = 4000;  // bytes of a message
constexpr size_t kMostJobs = 100;
constexpr int64_t kMostBeginning = 1 << 16;  // of the log of a job that are looked through for a run's folder
constexpr std::string_view kRunFolder = "run folder ";

// The first word of `text`, which is removed with the blank behind it.
std::string_view word(std::string_view& text) {
  const size_t end = std::min(text.find(' '), text.size());
  const std::string_view first = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return first;
}

// The inverse of time_text().
std::optional<std::chrono::system_clock::time_point> time_of_text(std::string_view text) {
  if (text.size() != 27 || text[10] != 'T' || text[26] != 'Z') return std::nullopt;
  const auto digits = [&](size_t at, size_t size) { return number_of_text<int64_t>(text.substr(at, size)); };
  const auto year = digits(0, 4), month = digits(5, 2), day = digits(8, 2), hour = digits(11, 2),
             minute = digits(14, 2), second = digits(17, 2), micros = digits(20, 6);
  if (!year || !month || !day || !hour || !minute || !second || !micros) return std::nullopt;
  std::tm parts{};
  parts.tm_year = static_cast<int>(*year - 1900);
  parts.tm_mon = static_cast<int>(*month - 1);
  parts.tm_mday = static_cast<int>(*day);
  parts.tm_hour = static_cast<int>(*hour);
  parts.tm_min = static_cast<int>(*minute);
  parts.tm_sec = static_cast<int>(*second);
  return std::chrono::system_clock::from_time_t(timegm(&parts)) + std::chrono::microseconds(*micros);
}

std::optional<LogLevel> level_of(std::string_view name) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarn, LogLevel::kError}) {
    if (level_name(level) == name) return level;
  }
  return std::nullopt;
}

// The whole lines in the last kMostBytes of a file.
std::vector<std::string> lines_at_end(const std::string& path, bool& cut) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  std::vector<std::string> lines;
  if (!in) return lines;
  const int64_t size = in.tellg();
  in.seekg(std::max<int64_t>(0, size - kMostBytes));
  std::string line;
  if (size > kMostBytes) {
    cut = true;
    std::getline(in, line);
  }
  while (std::getline(in, line)) lines.push_back(line);
  return lines;
}

std::vector<LogRecord> records_of(const std::string& path, bool& cut) {
  std::vector<LogRecord> records;
  for (const std::string& line : lines_at_end(path, cut)) {
    LogRecord record;
    if (parse_log_line(line, record)) {
      records.push_back(std::move(record));
    } else if (!records.empty() && line.starts_with("    ") && records.back().message.size() < kMostMessage) {
      records.back().message += "\n" + line.substr(4);
    }
  }
  return records;
}

// "rank-12.log", "rank-12.1.log" -> 12
std::optional<int> rank_of_file(const std::string& name) {
  if (!name.starts_with("rank-") || !name.ends_with(".log")) return std::nullopt;
  std::string middle = name.substr(5, name.size() - 9);
  if (middle.ends_with(".1")) middle.resize(middle.size() - 2);
  return number_of_text<int>(middle);
}

// Which of a run's first messages say what it is and what it computes on (Run::announce and others of the trainer).
bool tells_what_it_is(const std::string& message) {
  for (const char* begin : {"device ", "attention kernel ", "memory: ", "data ", "MFU is ", "no MFU: "}) {
    if (message.starts_with(begin)) return true;
  }
  return false;
}

void read_course(const std::vector<LogRecord>& records, RunLog& log) {
  for (const LogRecord& record : records) {
    if (record.level == LogLevel::kError) {
      log.end = RunLog::End::kFailed;
      log.end_text = record.message;
      continue;
    }
    if (record.module != "train" || record.rank > 0 || record.level != LogLevel::kInfo) continue;
    const std::string& message = record.message;
    if (message.starts_with("device ")) {  // a process begins
      log.begins.clear();
      log.end = RunLog::End::kUnknown;
      log.end_text.clear();
    }
    if (tells_what_it_is(message)) log.begins.push_back(record);
    if (message.starts_with("done: ") || message.starts_with("stopped ")) {
      log.end = message[0] == 'd' ? RunLog::End::kDone : RunLog::End::kStopped;
      log.end_text = message;
    }
  }
}

// A message without its numbers: what differs in them alone is one entry.
std::string without_numbers(const std::string& message) {
  std::string out;
  for (const char c : message) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit) out += c;
    if (digit && !out.ends_with('#')) out += '#';
  }
  return out;
}

// Whether the log of a job is of this run: "... run folder runs/NAME", at the end or before two blanks.
bool is_of_run(const std::string& job_log, const std::string& name) {
  std::ifstream in(job_log, std::ios::binary);
  std::string text(kMostBeginning, '\0');
  in.read(text.data(), kMostBeginning);
  text.resize(in.gcount());
  const std::string mark = "/" + name;
  for (size_t at = text.find(kRunFolder); at != std::string::npos; at = text.find(kRunFolder, at + 1)) {
    const size_t end =
        std::min({text.find('\n', at), text.find("  ", at + kRunFolder.size()), text.find('"', at), text.size()});
    if (std::string_view(text).substr(at, end - at).ends_with(mark)) return true;
  }
  return false;
}

// What `launch` said as a warning or an error in the newest job that trained this run; the first error is the reason.
std::vector<LogRecord> launcher_records(const std::string& run, bool& cut) {
  std::error_code error;
  const fs::path folder = fs::weakly_canonical(run, error);
  std::vector<std::string> jobs;
  for (fs::directory_iterator it(folder.parent_path() / "logs", error), end; !error && it != end; it.increment(error)) {
    jobs.push_back((it->path() / "job.log").string());
  }
  std::sort(jobs.rbegin(), jobs.rend());
  if (jobs.size() > kMostJobs) jobs.resize(kMostJobs);
  for (const std::string& job : jobs) {
    if (!is_of_run(job, folder.filename().string())) continue;
    std::vector<LogRecord> said;
    for (LogRecord& record : records_of(job, cut)) {
      const bool of_launcher = record.module == "launcher" && record.rank == kNoRank;
      if (of_launcher && (record.level == LogLevel::kWarn || record.level == LogLevel::kError)) said.push_back(record);
    }
    return said;
  }
  return {};
}

}  // namespace

bool parse_log_line(const std::string& line, LogRecord& record) {
  if (line.starts_with("{")) {
    const auto parsed = record_from_json(line);
    if (parsed) record = *parsed;
    return parsed.has_value();
  }
  std::string_view rest = line;
  const auto time = time_of_text(word(rest));
  const auto level = level_of(word(rest));
  if (!time || !level) return false;
  record = {.time = *time, .level = *level, .host = std::string(word(rest))};
  if (record.host == "-") record.host.clear();
  constexpr std::string_view kLauncher = "launcher ";
  if (rest.starts_with(kLauncher)) {
    record.module = "launcher";
    record.message = std::string(rest.substr(kLauncher.size(), kMostMessage));
    return true;
  }
  const size_t open = rest.find('['), close = rest.find("] ", std::min(open, rest.size()));
  if (open == std::string_view::npos || close == std::string_view::npos) return false;
  if (rest.starts_with("rank ")) {
    const std::string_view number = rest.substr(5, open > 6 ? open - 6 : 0);
    record.rank = number_of_text<int>(number).value_or(kNoRank);
  }
  record.module = std::string(rest.substr(open + 1, close - open - 1));
  record.message = std::string(rest.substr(close + 2, kMostMessage));
  return true;
}

RunLog read_run_log(const std::string& run) {
  std::vector<std::pair<int, std::string>> files;
  std::error_code error;
  for (fs::directory_iterator it(run + "/logs", error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (const auto rank = rank_of_file(name)) files.emplace_back(*rank, it->path().string());
  }
  std::sort(files.begin(), files.end());
  RunLog log;
  if (files.size() > kMostFiles) {
    files.resize(kMostFiles);
    log.cut = true;
  }
  std::vector<LogRecord> all;
  for (const auto& [rank, path] : files) {
    std::vector<LogRecord> records = records_of(path, log.cut);
    for (LogRecord& record : records) {
      if (record.rank == kNoRank) record.rank = rank;
    }
    std::move(records.begin(), records.end(), std::back_inserter(all));
  }
  std::stable_sort(all.begin(), all.end(), [](const LogRecord& a, const LogRecord& b) { return a.time < b.time; });
  read_course(all, log);
  if (log.end == RunLog::End::kUnknown) {
    for (LogRecord& record : launcher_records(run, log.cut)) {
      if (record.level == LogLevel::kError && log.end != RunLog::End::kFailed) {
        log.end = RunLog::End::kFailed;
        log.end_text = record.message;
      }
      all.push_back(std::move(record));
    }
  }

  std::map<std::tuple<LogLevel, std::string, std::string>, size_t> known;
  for (const LogRecord& record : all) {
    if (record.level != LogLevel::kWarn && record.level != LogLevel::kError) continue;
    const auto [entry, is_new] =
        known.try_emplace(std::tuple(record.level, record.module, without_numbers(record.message)), log.entries.size());
    if (is_new) log.entries.push_back({.record = record, .times = 0, .last = {}, .last_message = {}});
    RunLog::Entry& one = log.entries[entry->second];
    ++one.times;
    one.last = time_text(record.time);
    one.last_message = record.message;
    if (record.rank == kNoRank) continue;
    auto& ranks = one.record.ranks;
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), record.rank);
    if (at == ranks.end() || *at != record.rank) ranks.insert(at, record.rank);
  }
  if (log.entries.size() > kMostEntries) {
    log.left_out = static_cast<int64_t>(log.entries.size() - kMostEntries);
    log.entries.erase(log.entries.begin(), log.entries.begin() + log.left_out);
  }
  return log;
}

}  // namespace annulus
