// A FileSystem that fails where a test says, on top of the real one: the n-th operation runs out of space, or the
// process "dies" there (nothing after it has any effect), optionally losing what was written but not synced, as when
// the power fails. Used by every test of code that writes files.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "common/error.h"
#include "common/files.h"

namespace annulus {

class FaultyFiles : public FileSystem {
 public:
  enum class Fault {
    kFull,   // the operation fails once; a write puts half of its bytes down first. Clean-up works again
    kDeath,  // the operation, half of it in case of a write, is the last one
    kPower,  // kDeath, and every file that was not synced is cut in half or gets garbage
  };
  struct Dead {};  // what stands for the end of the process

  // fault_at: the operation (counted from 0) that fails; a negative number lets all succeed.
  FaultyFiles(Fault fault, int fault_at) : fault_(fault), fault_at_(fault_at) {}

  int operations() const { return count_; }
  bool failed() const { return failed_; }

  std::unique_ptr<OutputFile> create(const std::string& path) override {
    const auto body = [&] { return real().create(path); };
    step(path, nullptr);
    return std::make_unique<File>(*this, path, body());
  }
  void rename(const std::string& from, const std::string& to) override {
    step(to, nullptr);
    real().rename(from, to);
    // What was not synced is now lost under its new name.
    std::map<std::string, bool> moved;
    for (const auto& [path, dirty] : dirty_) {
      const bool below = path == from || path.starts_with(from + "/");
      moved[below ? to + path.substr(from.size()) : path] = dirty;
    }
    dirty_ = std::move(moved);
  }
  void sync_folder(const std::string& path) override {
    step(path, nullptr);
    real().sync_folder(path);
  }
  void make_folder(const std::string& path) override {
    step(path, nullptr);
    real().make_folder(path);
  }
  void remove_all(const std::string& path) override {
    // A removal that dies half way leaves part of a folder.
    step(path, [&] {
      std::error_code ignored;
      for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
        std::filesystem::remove(entry.path(), ignored);
        break;
      }
    });
    real().remove_all(path);
  }

 private:
  class File : public OutputFile {
   public:
    File(FaultyFiles& owner, std::string path, std::unique_ptr<OutputFile> file)
        : owner_(owner), path_(std::move(path)), file_(std::move(file)) {
      owner_.dirty_[path_] = true;
    }
    void write(const void* data, size_t bytes) override {
      owner_.step(path_, [&] { file_->write(data, bytes / 2); });
      file_->write(data, bytes);
      owner_.dirty_[path_] = true;
    }
    void sync() override {
      owner_.step(path_, nullptr);
      file_->sync();
      owner_.dirty_[path_] = false;
    }
    void close() override {
      owner_.step(path_, nullptr);
      file_->close();
    }

   private:
    FaultyFiles& owner_;
    std::string path_;
    std::unique_ptr<OutputFile> file_;
  };

  void step(const std::string& path, const std::function<void()>& half) {
    if (dead_) throw Dead();
    if (count_++ != fault_at_) return;
    failed_ = true;
    if (half) half();
    if (fault_ == Fault::kFull) throw Error(ErrorKind::kResource, "files", "cannot write " + path + ": no space left");
    dead_ = true;
    if (fault_ == Fault::kPower) lose();
    throw Dead();
  }

  void lose() {
    bool cut = true;
    for (const auto& [path, dirty] : dirty_) {
      if (!dirty || !std::filesystem::exists(path)) continue;
      const auto size = std::filesystem::file_size(path);
      if (cut) {
        std::filesystem::resize_file(path, size / 2);
      } else {
        std::ofstream(path, std::ios::binary) << std::string(size, '\0');
      }
      cut = !cut;
    }
  }

  Fault fault_;
  int fault_at_;
  int count_ = 0;
  bool failed_ = false;
  bool dead_ = false;
  std::map<std::string, bool> dirty_;
};

}  // namespace annulus
