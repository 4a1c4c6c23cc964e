// See files.h.
#include "common/files.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "common/descriptor.h"
#include "common/text.h"

namespace annulus {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path, int error) {
  throw Error(ErrorKind::kResource, "files", "cannot " + what + " " + path + ": " + writing_error_text(error));
}

class RealOutputFile : public OutputFile {
 public:
  explicit RealOutputFile(const std::string& path) : path_(path) {
    fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail("create", path, errno);
  }
  ~RealOutputFile() override {
    if (fd_ >= 0) ::close(fd_);
  }
  void write(const void* data, size_t bytes) override {
    const int error = write_fully(fd_, {static_cast<const char*>(data), bytes});
    if (error != 0) fail("write", path_, error);
  }
  void sync() override {
    if (::fsync(fd_) != 0) fail("sync", path_, errno);
  }
  void close() override {
    const int fd = fd_;
    fd_ = -1;
    if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail("close", path_, errno);
  }

 private:
  std::string path_;
  int fd_ = -1;
};

class RealFileSystem : public FileSystem {
 public:
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    return std::make_unique<RealOutputFile>(path);
  }
  void rename(const std::string& from, const std::string& to) override {
    if (std::rename(from.c_str(), to.c_str()) != 0) fail("rename " + from + " to", to, errno);
  }
  void sync_folder(const std::string& path) override {
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0) fail("open the folder", path, errno);
    // Some network file systems do not support syncing a folder; there is no alternative on them.
    if (::fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) fail("sync the folder", path, errno);
  }
  void make_folder(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) == 0) return;
    const int error = errno;
    if (error == EEXIST && std::filesystem::is_directory(path)) return;
    fail("make the folder", path, error);
  }
  void remove_all(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("remove", path, error.value());
  }
};

}  // namespace

FileSystem& FileSystem::real() {
  static RealFileSystem files;
  return files;
}

std::string temporary_beside(const std::string& path) { return path + ".tmp-" + std::to_string(::getpid()); }

int write_fully(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(written);
    } else if (errno == EAGAIN) {
      pollfd writable{fd, POLLOUT, 0};
      ::poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

std::string writing_error_text(int error) {
  std::string text = std::strerror(error);
  if (error == ENOSPC || error == EDQUOT) return text + "; free some space or write elsewhere";
  if (error == EACCES || error == EPERM || error == EROFS) return text + "; choose a folder that you may write to";
  rlimit limit{};
  if (error != EFBIG || getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return text;
  return text + "; this process may write files of at most " + with_commas(limit.rlim_cur, "byte") +
         ": raise the limit (ulimit -f)";
}

ErrorKind kind_of_errno(int error) {
  switch (error) {
    case 0:
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case EINVAL:
    case ENXIO:
    case ENOTSUP:  // what std::filesystem reports for the size of a pipe
      return ErrorKind::kInput;
    default:
      return ErrorKind::kResource;
  }
}

void require_output(std::string_view module, const std::string& named, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error(ErrorKind::kUsage, module,
                named + (fs::is_directory(status) ? " is a folder" : " is no regular file") + ": name a file to write");
  }
  const std::string folder = folder_of(path);
  if (!fs::is_directory(folder, error)) {
    throw Error(ErrorKind::kResource, module,
                "the folder of " + named + " does not exist; make it with: " + shell_quote({"mkdir", "-p", folder}));
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Error(ErrorKind::kResource, module, named + " cannot be written: " + std::strerror(errno));
  }
}

std::string read_small_file(std::string_view module, const std::string& path, size_t most) {
  const auto unreadable = [&](int reason) {
    return Error(kind_of_errno(reason), std::string(module), path + " cannot be read: " + std::strerror(reason));
  };
  std::error_code error;
  const uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error) throw unreadable(error.value());
  if (bytes > most) {
    throw Error(ErrorKind::kInput, std::string(module),
                path + " has " + counted(bytes, "byte") + ", but at most " + std::to_string(most) +
                    " were expected: it must be another kind of file");
  }
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) throw unreadable(errno);
  return text.str();
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string read_to_end(int fd) {
  std::string text;
  std::array<char, 4096> piece;
  for (;;) {
    const ssize_t n = ::read(fd, piece.data(), piece.size());
    if (n > 0) text.append(piece.data(), n);
    if (n == 0 || (n < 0 && errno != EINTR)) return text;
  }
}

bool same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  const auto whole = [](const std::string& path) {
    std::error_code unknown;
    const fs::path resolved = fs::weakly_canonical(fs::absolute(path), unknown);
    return unknown ? fs::absolute(path).lexically_normal() : resolved;
  };
  return whole(a) == whole(b);
}

bool is_file(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

void replace_file(FileSystem& files, const std::string& path,
                  const std::function<void(const std::string& beside)>& write) {
  namespace fs = std::filesystem;
  std::error_code unknown;
  const fs::file_status status = fs::status(path, unknown);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error(ErrorKind::kUsage, "files", path + " exists and is no regular file: name a file to write");
  }
  const std::string target = fs::is_symlink(fs::symlink_status(path, unknown)) && fs::exists(status)
                                 ? fs::canonical(path, unknown).string()
                                 : path;
  const std::string beside = temporary_beside(target);
  try {
    write(beside);
    files.rename(beside, target);
  } catch (...) {
    try {
      files.remove_all(beside);
    } catch (...) {  // the first failure is the one to report
    }
    throw;
  }
  files.sync_folder(folder_of(target));
}

void write_atomically(FileSystem& files, const std::string& path, std::string_view content) {
  replace_file(files, path, [&](const std::string& beside) {
    auto file = files.create(beside);
    file->write(content.data(), content.size());
    file->sync();
    file->close();
  });
}

}  // namespace annulus
