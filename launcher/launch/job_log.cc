// See job_log.h.
#include "launcher/launch/job_log.h"

#include <fstream>

#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

constexpr size_t kMostWarnings = 10000;

}  // namespace

JobLog::JobLog(const std::string& log_dir, bool json, size_t most)
    : path_(log_dir + "/job.log"), json_(json), most_(most), file_(log_dir, "job.log") {}

std::string JobLog::line_of(const LogRecord& record) const {
  return (json_ ? json_text(record) : file_text(record)) + "\n";
}

void JobLog::add(const LogRecord& record) {
  const std::string line = line_of(record);
  file_.add(line);
  file_.flush();
  records_.push_back(record);
  bytes_ += line.size();
  while (bytes_ > most_) {
    const size_t size = line_of(records_.front()).size();
    bytes_ -= size;
    settled_ += size;
    records_.pop_front();
  }
}

bool JobLog::is_news(const LogRecord& record) {
  if (record.level < LogLevel::kWarn || warned_.size() >= kMostWarnings) return true;
  return warned_.try_emplace({record.level, record.room, record.message}, record.rank).first->second == record.rank;
}

void JobLog::merge(std::optional<int> culprit) {
  if (!file_.lost().empty()) return;
  try {
    std::string text(settled_, '\0');
    if (settled_ > 0) std::ifstream(path_, std::ios::binary).read(text.data(), static_cast<std::streamsize>(settled_));
    for (const LogRecord& record : merged({records_.begin(), records_.end()}, culprit)) text += line_of(record);
    write_atomically(FileSystem::real(), path_, text);
  } catch (const Error&) {
    // The file still has every record, in the order of arrival.
  }
}

}  // namespace annulus
