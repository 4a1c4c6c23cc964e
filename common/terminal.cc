// See terminal.h.
#include "common/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace annulus {

bool takes_escapes(int fd) {
  const char* const term = std::getenv("TERM");
  const std::string_view name = term != nullptr ? term : "";
  return isatty(fd) == 1 && !name.empty() && name != "dumb";
}

int terminal_columns(int fd) {
  const char* const set = std::getenv("ANNULUS_COLUMNS");
  if (const int columns = set != nullptr ? std::atoi(set) : 0; columns > 0) return columns;
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace annulus
