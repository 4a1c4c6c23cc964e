// See job_log.h.
#include "launcher/launch/job_log.h"

#include <algorithm>
#include <exception>
#include <fstream>
#include <iterator>
#include <utility>

#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

constexpr size_t kMostWarnings = 10000;

size_t memory_of(const LogRecord& record) {
  return sizeof record + record.host.size() + record.module.size() + record.message.size();
}

// Copies the first `bytes` bytes of the file `from`, a piece at a time. Throws Error(kResource) if it has fewer.
void copy_front(const std::string& from, size_t bytes, OutputFile& to) {
  std::ifstream file(from, std::ios::binary);
  std::vector<char> piece(std::min(bytes, size_t{1} << 20));
  while (bytes > 0) {
    const size_t count = std::min(bytes, piece.size());
    if (!file.read(piece.data(), static_cast<std::streamsize>(count))) {
      throw Error(ErrorKind::kResource, "launcher", from + " is shorter than what was written to it");
    }
    to.write(piece.data(), count);
    bytes -= count;
  }
}

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
  bytes_ += memory_of(record);
  while (bytes_ > most_) {
    bytes_ -= memory_of(records_.front());
    settled_ += line_of(records_.front()).size();
    records_.pop_front();
  }
}

bool JobLog::is_news(const LogRecord& record) {
  if (record.level < LogLevel::kWarn || warned_.size() >= kMostWarnings) return true;
  const First now{record.rank, record.time};
  First& first = warned_.try_emplace({record.level, record.module, record.message}, now).first->second;
  if (std::chrono::abs(record.time - first.time) > kFoldTime) first = now;
  return first.rank == record.rank;
}

void JobLog::merge(std::optional<int> failed) {
  if (!file_.lost().empty()) return;
  try {
    std::vector<LogRecord> records(std::make_move_iterator(records_.begin()), std::make_move_iterator(records_.end()));
    records_.clear();
    records = merged(std::move(records), failed);
    replace_file(FileSystem::real(), path_, [&](const std::string& beside) {
      const auto file = FileSystem::real().create(beside);
      copy_front(path_, settled_, *file);
      for (const LogRecord& record : records) {
        const std::string line = line_of(record);
        file->write(line.data(), line.size());
      }
      file->sync();
      file->close();
    });
  } catch (const std::exception&) {
    // Even if memory or the disk is full, the file still has every record, in the order of arrival.
  }
}

}  // namespace annulus
