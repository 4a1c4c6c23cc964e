// See terminal.h.
#include "launcher/launch/terminal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "common/files.h"
#include "common/terminal.h"

namespace annulus {

Terminal::Terminal(int out, int err)
    : fd_{out, err}, tty_{isatty(out) == 1, isatty(err) == 1}, erases_{takes_escapes(out), takes_escapes(err)} {
  struct stat a {
  }, b{};
  shared_ = (tty_[0] && tty_[1]) ||
            (fstat(out, &a) == 0 && fstat(err, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino);
}

void Terminal::put(Stream stream, std::string_view bytes) {
  if (error_[stream] != 0) return;
  const int error = write_fully(fd_[stream], bytes);
  error_[stream] = error == EIO && tty_[stream] ? EPIPE : error;
}

void Terminal::write_raw(Stream stream, std::string_view bytes) {
  if (bytes.empty()) return;
  put(stream, bytes);
  mid_line_[stream] = bytes.back() != '\n';
  if (shared_) mid_line_[1 - stream] = mid_line_[stream];
}

void Terminal::write_line(Stream stream, std::string_view text) {
  std::string line;
  if (mid_line_[stream]) line = erases_[stream] ? "\r\x1b[K" : "\n";
  line += text;
  line += '\n';
  put(stream, line);
  mid_line_[stream] = false;
  if (shared_) mid_line_[1 - stream] = false;
}

}  // namespace annulus
