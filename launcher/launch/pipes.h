// Pipes that the launcher reads without waiting. Used by rank_streams.cc and supervisor.cc.
#pragma once

#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <string_view>

namespace annulus {

// Error(kResource): what failed, and errno.
[[noreturn]] void refuse_call(const char* what);

// A new named pipe at `path`, open for reading. Raises Error(kResource).
int open_fifo(const std::string& path);

// Gives sink(bytes) what is there to read; closes fd (and sets it to -1) at its end.
template <typename Sink>
void drain(int& fd, Sink&& sink) {
  std::array<char, 16384> buffer;
  // No more than a pipe holds: a rank that never stops printing must not keep signals and deadlines waiting.
  for (int i = 0; fd >= 0 && i < 16; ++i) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n > 0) {
      sink(std::string_view(buffer.data(), static_cast<size_t>(n)));
    } else if (n == 0) {
      close(fd);
      fd = -1;
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace annulus
