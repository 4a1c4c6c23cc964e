// A FileSystem for tests of code that writes files. It uses the real file system, but its n-th operation runs out of
// space, or the process "dies" there (no later operation has any effect), optionally with the loss of what was written
// but not synced, as in a power failure. It is thread safe, so that ranks can share one.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/files.h"

namespace annulus {

class FaultyFiles : public FileSystem {
 public:
  enum class Fault {
    kFull,   // the operation fails once, a write after half of its bytes; later operations succeed
    kDeath,  // the operation is the last one; a write makes half of its bytes
    kPower,  // kDeath, and every file that was not synced is cut in half or filled with zeros
    kNames,  // kPower, and every name that was made or moved since its folder was synced is as it was before. Names
             // that were removed stay removed: a disk may write one change early and another late
  };
  struct Dead {};  // thrown in place of the end of the process

  // `fault_at` is the operation (counted from 0) that fails; with a negative number all succeed.
  FaultyFiles(Fault fault, int fault_at) : fault_(fault), fault_at_(fault_at) {}

  int operations() const { return count_; }
  bool failed() const { return failed_; }
  // Called when the process dies, before Dead is thrown, for code that catches all exceptions and would continue.
  std::function<void()> on_death;

  // Simulates a power failure after all operations have succeeded, with the losses of Fault::kNames.
  void lose_power() {
    const Lock lock(mutex_);
    dead_ = true;
    lose_content();
    lose_names();
  }

  std::unique_ptr<OutputFile> create(const std::string& path) override {
    const Lock lock(mutex_);
    step(path, nullptr);
    const bool is_new = !std::filesystem::exists(path);
    auto file = real().create(path);
    if (is_new) names_.push_back({Name::kMade, folder_of(path), "", path, false, std::nullopt});
    return std::make_unique<File>(*this, path, std::move(file));
  }
  void rename(const std::string& from, const std::string& to) override {
    const Lock lock(mutex_);
    step(to, nullptr);
    std::optional<std::string> replaced;
    if (std::filesystem::is_regular_file(to)) replaced = content_of(to);
    real().rename(from, to);
    // Content that was not synced can now be lost under the new name.
    std::map<std::string, bool> dirty;
    for (const auto& [path, is_dirty] : dirty_) dirty[moved(path, from, to)] = is_dirty;
    dirty_ = std::move(dirty);
    for (Name& name : names_) name.move(from, to);
    names_.push_back({Name::kMoved, folder_of(to), from, to, std::filesystem::is_directory(to), std::move(replaced)});
  }
  void sync_folder(const std::string& path) override {
    const Lock lock(mutex_);
    step(path, nullptr);  // losses are simulated, so the real disk need not be synced
    names_.erase(std::remove_if(names_.begin(), names_.end(), [&](const Name& name) { return name.folder == path; }),
                 names_.end());
  }
  void make_folder(const std::string& path) override {
    const Lock lock(mutex_);
    step(path, nullptr);
    const bool is_new = !std::filesystem::exists(path);
    real().make_folder(path);
    if (is_new) names_.push_back({Name::kMade, folder_of(path), "", path, false, std::nullopt});
  }
  void remove_all(const std::string& path) override {
    const Lock lock(mutex_);
    // A removal that is interrupted leaves part of the folder.
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
  using Lock = std::lock_guard<std::recursive_mutex>;

  class File : public OutputFile {
   public:
    File(FaultyFiles& owner, std::string path, std::unique_ptr<OutputFile> file)
        : owner_(owner), path_(std::move(path)), file_(std::move(file)) {
      owner_.dirty_[path_] = true;
    }
    void write(const void* data, size_t bytes) override {
      const Lock lock(owner_.mutex_);
      owner_.step(path_, [&] { file_->write(data, bytes / 2); });
      file_->write(data, bytes);
      owner_.dirty_[path_] = true;
    }
    void sync() override {
      const Lock lock(owner_.mutex_);
      owner_.step(path_, nullptr);
      owner_.dirty_[path_] = false;
    }
    void close() override {
      const Lock lock(owner_.mutex_);
      owner_.step(path_, nullptr);
      file_->close();
    }

   private:
    FaultyFiles& owner_;
    std::string path_;
    std::unique_ptr<OutputFile> file_;
  };

  // A change of a folder that is not on the disk yet. Names are moved only within one folder.
  struct Name {
    enum Kind { kMade, kMoved } kind;
    std::string folder;
    std::string before, after;
    bool is_folder;
    std::optional<std::string> replaced;  // the content of the file that a move replaced

    // Updates the paths after the folder of this change, or a folder above it, was renamed.
    void move(const std::string& from, const std::string& to) {
      if (folder != from && !folder.starts_with(from + "/")) return;
      for (std::string* path : {&folder, &before, &after}) *path = moved(*path, from, to);
    }
  };

  static std::string moved(const std::string& path, const std::string& from, const std::string& to) {
    return path == from || path.starts_with(from + "/") ? to + path.substr(from.size()) : path;
  }

  static std::string content_of(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  void step(const std::string& path, const std::function<void()>& half) {
    if (dead_) throw Dead();
    if (count_++ != fault_at_) return;
    failed_ = true;
    if (half) half();
    if (fault_ == Fault::kFull) throw Error(ErrorKind::kResource, "files", "cannot write " + path + ": no space left");
    dead_ = true;
    if (fault_ == Fault::kPower || fault_ == Fault::kNames) lose_content();
    if (fault_ == Fault::kNames) lose_names();
    if (on_death) on_death();
    throw Dead();
  }

  void lose_content() {
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

  // The latest change is undone first, because an older name may be within a newer one.
  void lose_names() {
    for (auto name = names_.rbegin(); name != names_.rend(); ++name) {
      if (name->kind == Name::kMade) {
        std::filesystem::remove_all(name->after);
        continue;
      }
      // A folder that was removed under its new name is empty under its old name.
      if (std::filesystem::exists(name->after)) {
        std::filesystem::rename(name->after, name->before);
      } else if (name->is_folder) {
        std::filesystem::create_directory(name->before);
      }
      if (name->replaced) std::ofstream(name->after, std::ios::binary) << *name->replaced;
      for (auto earlier = std::next(name); earlier != names_.rend(); ++earlier) {
        earlier->move(name->after, name->before);
      }
    }
    names_.clear();
  }

  std::recursive_mutex mutex_;
  Fault fault_;
  int fault_at_;
  int count_ = 0;
  bool failed_ = false;
  bool dead_ = false;
  std::map<std::string, bool> dirty_;
  std::vector<Name> names_;
};

}  // namespace annulus
