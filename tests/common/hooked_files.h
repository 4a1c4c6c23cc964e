// A FileSystem for tests, which calls a hook before each operation on the real files. The hook may wait, raise an error
// or count. Thread safe if the hook is.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "common/files.h"

namespace annulus {

class HookedFiles : public FileSystem {
 public:
  // `operation` is "create", "write", "sync", "close", "rename", "sync folder", "make folder" or "remove"; a rename's
  // path is the new one.
  using Hook = std::function<void(const std::string& operation, const std::string& path)>;
  explicit HookedFiles(Hook hook) : hook_(std::move(hook)) {}

  std::unique_ptr<OutputFile> create(const std::string& path) override {
    hook_("create", path);
    return std::make_unique<File>(*this, path, real().create(path));
  }
  void rename(const std::string& from, const std::string& to) override {
    hook_("rename", to);
    real().rename(from, to);
  }
  void sync_folder(const std::string& path) override {
    hook_("sync folder", path);
    real().sync_folder(path);
  }
  void make_folder(const std::string& path) override {
    hook_("make folder", path);
    real().make_folder(path);
  }
  void remove_all(const std::string& path) override {
    hook_("remove", path);
    real().remove_all(path);
  }

 private:
  class File : public OutputFile {
   public:
    File(HookedFiles& owner, std::string path, std::unique_ptr<OutputFile> file)
        : owner_(owner), path_(std::move(path)), file_(std::move(file)) {}
    void write(const void* data, size_t bytes) override {
      owner_.hook_("write", path_);
      file_->write(data, bytes);
    }
    void sync() override {
      owner_.hook_("sync", path_);
      file_->sync();
    }
    void close() override {
      owner_.hook_("close", path_);
      file_->close();
    }

   private:
    HookedFiles& owner_;
    std::string path_;
    std::unique_ptr<OutputFile> file_;
  };

  Hook hook_;
};

}  // namespace annulus
