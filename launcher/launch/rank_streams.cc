// See rank_streams.h.
#include "launcher/launch/rank_streams.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "launcher/hosts/sockets.h"

namespace annulus {
namespace {

std::string prefix(size_t i) { return "[rank " + std::to_string(i) + "] "; }

}  // namespace

LogFile::LogFile(const std::string& log_dir, const std::string& name)
    : path_(log_dir + "/" + name), file_(path_, std::ios::trunc) {
  if (!file_) throw Error(ErrorKind::kResource, "launcher", "cannot write " + path_ + ": " + writing_error_text(errno));
}

void LogFile::add(std::string_view text) {
  errno = 0;
  file_ << text;
  note_failure();
}

void LogFile::flush() {
  errno = 0;
  file_.flush();
  note_failure();
}

void LogFile::note_failure() {
  if (error_ == 0 && !file_) error_ = errno == 0 ? EIO : errno;
}

std::string LogFile::lost() const { return error_ == 0 ? "" : path_ + ": " + std::strerror(error_); }

RankStreams::RankStreams(int ranks, const std::string& log_dir, Terminal& terminal)
    : terminal_(terminal), ranks_(ranks) {
  for (size_t i = 0; i < ranks_.size(); ++i) ranks_[i].log = LogFile(log_dir, "rank-" + std::to_string(i) + ".log");
}

RankStreams::~RankStreams() {
  for (const Rank& r : ranks_) {
    for (const int fd : {r.out.fd, r.err.fd}) {
      if (fd >= 0) close(fd);
    }
  }
}

void RankStreams::adopt(int rank, Terminal::Stream stream, int fd) {
  Rank& r = ranks_[rank];
  Source& source = stream == Terminal::kOut ? r.out : r.err;
  if (source.fd >= 0) close(source.fd);
  source.fd = fd;
}

bool RankStreams::expects_more() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.out.fd >= 0 || r.err.fd >= 0; });
}

void RankStreams::watch(std::vector<pollfd>& fds) const {
  for (const Rank& r : ranks_) {
    for (const int fd : {r.out.fd, r.err.fd}) {
      if (fd >= 0) fds.push_back({fd, POLLIN, 0});
    }
  }
}

void RankStreams::read(int rank) {
  const auto i = static_cast<size_t>(rank);
  Rank& r = ranks_[i];
  for (const auto& [source, stream] : {std::pair(&r.out, Terminal::kOut), std::pair(&r.err, Terminal::kErr)}) {
    const std::string bytes = read_available(source->fd);
    if (bytes.empty()) continue;
    if (arrived_) arrived_(rank);
    take(i, *source, stream, bytes);
  }
}

void RankStreams::read_all() {
  for (size_t i = 0; i < ranks_.size(); ++i) read(static_cast<int>(i));
}

void RankStreams::take(size_t i, Source& source, Terminal::Stream stream, std::string_view bytes) {
  ranks_[i].shown = ++shown_;
  if (i == 0 && !is_hidden(stream)) terminal_.write_raw(stream, bytes);
  source.lines.feed(bytes, [&](std::string_view line, bool replaced) { take_line(i, stream, line, replaced); });
  ranks_[i].log.flush();
}

void RankStreams::take_line(size_t i, Terminal::Stream stream, std::string_view line, bool replaced) {
  if (i != 0 && !replaced && !is_hidden(stream)) terminal_.write_line(stream, prefix(i) + std::string(line));
  Rank& r = ranks_[i];
  if (replaced) {
    // A live line is overwritten many times a second. The log keeps one every ten seconds.
    const auto now = std::chrono::steady_clock::now();
    if (now - r.last_live < std::chrono::seconds(10)) return;
    r.last_live = now;
  }
  r.log.add(std::string(line) + "\n");
  if (stream == Terminal::kOut) return;
  keep_error_line(i, line);
  if (told_) told_(static_cast<int>(i), line);
}

void RankStreams::keep_error_line(size_t i, std::string_view line) {
  std::deque<std::string>& tail = ranks_[i].tail;
  tail.emplace_back(line);
  if (tail.size() > 10) tail.pop_front();
}

void RankStreams::say(int rank, const std::string& text, bool bare) {
  const auto i = static_cast<size_t>(rank);
  ranks_[i].shown = ++shown_;
  for (const std::string& line : split(text, '\n')) {
    terminal_.write_line(Terminal::kErr, (i == 0 || bare ? "" : prefix(i)) + line);
    ranks_[i].log.add(line + "\n");
    keep_error_line(i, line);
  }
  ranks_[i].log.flush();
}

void RankStreams::finish() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    for (const Terminal::Stream stream : {Terminal::kOut, Terminal::kErr}) {
      Source& source = stream == Terminal::kOut ? ranks_[i].out : ranks_[i].err;
      source.lines.finish([&](std::string_view line, bool) { take_line(i, stream, line, false); });
    }
    ranks_[i].log.flush();
  }
}

void RankStreams::note(int rank, const std::string& line) {
  LogFile& log = ranks_[rank].log;
  log.add(line + "\n");
  log.flush();
}

std::vector<std::string> RankStreams::lost_logs() const {
  std::vector<std::string> lost;
  for (const Rank& r : ranks_) {
    if (!r.log.lost().empty()) lost.push_back(r.log.lost());
  }
  return lost;
}

std::vector<std::string> RankStreams::unseen(int rank) const {
  const Rank& r = ranks_[rank];
  if (shown_ - r.shown <= 10) return {};
  return {r.tail.begin(), r.tail.end()};
}

}  // namespace annulus
