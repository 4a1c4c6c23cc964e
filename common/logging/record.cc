// See record.h.
#include "common/logging/record.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "common/text.h"

namespace annulus {
namespace {

using Clock = std::chrono::system_clock;

std::string who(const LogRecord& record) {
  if (!record.ranks.empty()) return "ranks " + ranges_text(record.ranks);
  return record.rank == kNoRank ? "launcher" : "rank " + std::to_string(record.rank);
}

// The inverse of time_text.
std::optional<Clock::time_point> time_of(const std::string& text) {
  std::tm utc{};
  int micros = 0, used = 0;
  if (std::sscanf(text.c_str(), "%4d-%2d-%2dT%2d:%2d:%2d.%6dZ%n", &utc.tm_year, &utc.tm_mon, &utc.tm_mday, &utc.tm_hour,
                  &utc.tm_min, &utc.tm_sec, &micros, &used) != 7 ||
      static_cast<size_t>(used) != text.size()) {
    return std::nullopt;
  }
  utc.tm_year -= 1900;
  utc.tm_mon -= 1;
  return Clock::from_time_t(timegm(&utc)) + std::chrono::microseconds(micros);
}

}  // namespace

const std::vector<std::string>& level_names() {
  // Never destroyed, because destructors of static objects may log.
  static const auto* const names = new std::vector<std::string>{"debug", "info", "warn", "error"};
  return *names;
}

std::string_view level_name(LogLevel level) { return level_names()[static_cast<size_t>(level)]; }

std::string time_text(Clock::time_point time) {
  const auto micros = std::chrono::floor<std::chrono::microseconds>(time.time_since_epoch()).count();
  const std::time_t seconds = micros / 1000000 - (micros % 1000000 < 0 ? 1 : 0);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  std::array<char, 32> day{};
  std::strftime(day.data(), day.size(), "%Y-%m-%dT%H:%M:%S", &utc);
  std::array<char, 16> rest{};
  std::snprintf(rest.data(), rest.size(), ".%06dZ", static_cast<int>(micros - int64_t{seconds} * 1000000));
  return std::string(day.data()) + rest.data();
}

std::string plain_text(const LogRecord& record) {
  std::string text = "annulus: ";
  if (record.level == LogLevel::kError) {
    if (record.of_one && record.rank != kNoRank) text += "rank " + std::to_string(record.rank) + ": ";
    if (!record.module.empty()) text += "[" + record.module + "] ";
  }
  return text + record.message;
}

std::string file_text(const LogRecord& record) {
  std::string text = time_text(record.time) + " " + std::string(level_name(record.level)) + " " +
                     (record.host.empty() ? "-" : record.host) + " " + who(record) + " ";
  if (!record.module.empty()) text += "[" + record.module + "] ";
  for (const char c : record.message) text += c == '\n' ? "\n    " : std::string(1, c);
  return text;
}

std::string json_text(const LogRecord& record) {
  nlohmann::ordered_json line;
  line["time"] = time_text(record.time);
  line["level"] = level_name(record.level);
  line["host"] = record.host;
  line["rank"] = record.rank == kNoRank ? nlohmann::ordered_json() : nlohmann::ordered_json(record.rank);
  if (!record.ranks.empty()) line["ranks"] = record.ranks;
  line["module"] = record.module;
  line["message"] = record.message;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::optional<LogRecord> record_from_json(std::string_view text) {
  const nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return std::nullopt;
  const auto text_at = [&](const char* key) -> std::optional<std::string> {
    const auto found = line.find(key);
    if (found == line.end() || !found->is_string()) return std::nullopt;
    return found->get<std::string>();
  };
  const std::optional<std::string> time = text_at("time"), level = text_at("level"), host = text_at("host"),
                                   module = text_at("module"), message = text_at("message");
  if (!time || !level || !host || !module || !message) return std::nullopt;
  const std::optional<Clock::time_point> at = time_of(*time);
  const auto known = std::find(level_names().begin(), level_names().end(), *level);
  if (!at || known == level_names().end()) return std::nullopt;
  LogRecord record{.time = *at,
                   .level = static_cast<LogLevel>(known - level_names().begin()),
                   .host = *host,
                   .module = *module,
                   .message = *message};
  if (const auto rank = line.find("rank"); rank != line.end() && rank->is_number_unsigned()) {
    record.rank = static_cast<int>(std::min<uint64_t>(rank->get<uint64_t>(), INT32_MAX));
  }
  return record;
}

std::vector<LogRecord> merged(std::vector<LogRecord> records, std::optional<int> failed) {
  const auto is_last = [&](const LogRecord& record) { return failed && record.rank == *failed; };
  std::stable_sort(records.begin(), records.end(), [&](const LogRecord& a, const LogRecord& b) {
    return std::make_pair(is_last(a), a.time) < std::make_pair(is_last(b), b.time);
  });
  // Where the first such record of the last kFoldTime is in `out`.
  std::map<std::tuple<LogLevel, std::string, std::string>, size_t> first;
  std::map<size_t, std::set<int>> ranks;
  std::vector<LogRecord> out;
  for (LogRecord& record : records) {
    const bool folds = record.level >= LogLevel::kWarn && record.rank != kNoRank && !is_last(record);
    if (folds) {
      auto [found, fresh] = first.try_emplace({record.level, record.module, record.message}, out.size());
      if (!fresh && record.time - out[found->second].time > kFoldTime) {
        found->second = out.size();
        fresh = true;
      }
      std::set<int>& seen = ranks[found->second];
      // A repetition by the same rank is kept.
      if (seen.insert(record.rank).second && !fresh) continue;
    }
    out.push_back(std::move(record));
  }
  for (const auto& [place, seen] : ranks) {
    if (seen.size() > 1) out[place].ranks.assign(seen.begin(), seen.end());
  }
  return out;
}

}  // namespace annulus
