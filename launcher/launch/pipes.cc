// See pipes.h.
#include "launcher/launch/pipes.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstring>

#include "common/error.h"

namespace annulus {

void refuse_call(const char* what) {
  throw Error(ErrorKind::kResource, "launcher", std::string(what) + " failed: " + std::strerror(errno));
}

int open_fifo(const std::string& path) {
  if (mkfifo(path.c_str(), 0600) != 0) refuse_call("mkfifo");
  // Opened for reading and writing, so that a rank can open its end at once, and so that there is no end of file while
  // ranks come and go.
  const int fd = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) refuse_call("open of a pipe");
  return fd;
}

}  // namespace annulus
