// SessionDir: a folder in shared memory for one launch or one survey of its hosts: Open MPI's own files, the pipes of
// the ranks. Used by launcher/launch/ and launcher/hosts/survey.cc.
#pragma once

#include <string>

namespace annulus {

class SessionDir {
 public:
  // Makes a fresh folder below /dev/shm (without one: TMPDIR, /tmp), which only this user can enter, and removes
  // those of launches and surveys that were killed. Raises Error(kResource).
  SessionDir();
  ~SessionDir();
  SessionDir(const SessionDir&) = delete;
  SessionDir& operator=(const SessionDir&) = delete;

  const std::string& path() const { return path_; }
  // The form of the path, for --dry-run.
  static std::string pattern();

 private:
  std::string path_;
  int lock_ = -1;
};

}  // namespace annulus
