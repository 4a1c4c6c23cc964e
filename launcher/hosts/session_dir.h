// SessionDir: a folder in shared memory for one launch or one host discovery. It holds Open MPI's own files and
// the socket of the launcher. Used by launcher/launch/ and launcher/hosts/host_discovery.cc.
#pragma once

#include <string>

namespace annulus {

class SessionDir {
 public:
  // Makes a new folder in /dev/shm (or, if that cannot be written, in TMPDIR or /tmp), which only this user can enter,
  // and removes folders of launches that were killed. Throws Error(kResource).
  SessionDir();
  ~SessionDir();
  SessionDir(const SessionDir&) = delete;
  SessionDir& operator=(const SessionDir&) = delete;

  const std::string& path() const { return path_; }
  // The pattern of the path, "/dev/shm/annulus-1000-XXXXXX", for --dry-run.
  static std::string pattern();

 private:
  std::string path_;
  int lock_ = -1;
};

}  // namespace annulus
