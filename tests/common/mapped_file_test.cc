// Tests of common/mapped_file.h.
#include "common/mapped_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/common/in_child.h"

namespace annulus::mapped_file_test {
namespace {

namespace fs = std::filesystem;

class MappedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = ::testing::TempDir() + "/mapped";
    fs::remove(path_);
  }

  // The time of modification is in the past, so that it differs from that of a change which a test makes at once.
  void put(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary) << bytes;
    const timespec times[2] = {{1000, 0}, {1000, 0}};
    ASSERT_EQ(utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  }

  std::string path_;
};

std::string pages(size_t n) {
  std::string text(n * 4096, 'x');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  return text;
}

TEST_F(MappedFileTest, CopiesTheContent) {
  const std::string text = pages(3) + "end";
  put(text);
  const MappedFile file("data", path_);
  EXPECT_EQ(file.size(), static_cast<int64_t>(text.size()));
  std::string part(5000, '\0');
  file.copy(4000, 5000, part.data());
  EXPECT_EQ(part, text.substr(4000, 5000));
  EXPECT_EQ(file.at<char>(file.size() - 1), 'd');
  file.will_need(1, file.size() - 1);
  file.will_need(0, file.size() + 1);
  uint32_t word = 0;
  std::memcpy(&word, text.data() + 13, sizeof word);
  EXPECT_EQ(file.at<uint32_t>(13), word);
  file.require_unchanged();
}

TEST_F(MappedFileTest, MapsEmptyFiles) {
  put("");
  const MappedFile file("data", path_);
  EXPECT_EQ(file.size(), 0);
  file.copy(0, 0, nullptr);
  file.will_need(0, 0);
}

TEST_F(MappedFileTest, RefusesRangesBeyondTheFile) {
  put("12345678");
  const MappedFile file("data", path_);
  char to[16];
  for (const auto& [offset, count] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 9}, {8, 1}, {9, 0}, {-1, 2}, {2, -1}, {INT64_MAX, INT64_MAX}, {4, INT64_MAX}}) {
    error_text(ErrorKind::kInternal, [&] { file.copy(offset, count, to); });
  }
  EXPECT_EQ(file.at<uint64_t>(0), 0x3837363534333231u);
}

TEST_F(MappedFileTest, TruncationIsAnErrorNotASignal) {
  put(pages(64));
  const MappedFile file("data", path_);
  EXPECT_EQ(file.at<char>(40 * 4096), pages(64)[40 * 4096]);
  fs::resize_file(path_, 10 * 4096 + 5);
  for (int i = 0; i < 3; ++i) {
    const std::string message = error_text(ErrorKind::kInput, [&] { file.at<char>(40 * 4096); });
    EXPECT_NE(message.find("[data] " + path_ + " has changed since the run began"), std::string::npos) << message;
    EXPECT_NE(message.find("it had 262,144 bytes, it has 40,965"), std::string::npos) << message;
  }
  std::string all(64 * 4096, '\0');
  error_text(ErrorKind::kInput, [&] { file.copy(0, 64 * 4096, all.data()); });
  EXPECT_EQ(file.at<char>(4096), pages(64)[4096]);  // what remains can be read
  error_text(ErrorKind::kInput, [&] { file.require_unchanged(); });
}

TEST_F(MappedFileTest, EveryThreadHasItsOwnGuard) {
  put(pages(64));
  const MappedFile file("data", path_);
  fs::resize_file(path_, 32 * 4096);
  std::vector<std::thread> threads;
  std::vector<int> errors(4), right(4);
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        try {
          right[t] += file.at<char>(4096 * (i % 64)) == pages(1)[0] || i % 64 < 32;
        } catch (const Error&) {
          ++errors[t];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(errors[t], 96);
    EXPECT_EQ(right[t], 104);
  }
}

TEST_F(MappedFileTest, DetectsWritesInPlace) {
  put("0123456789");
  const MappedFile file("data", path_);
  file.require_unchanged();
  std::fstream(path_, std::ios::binary | std::ios::in | std::ios::out) << "X";  // the size stays the same
  const std::string message = error_text(ErrorKind::kInput, [&] { file.require_unchanged(); });
  EXPECT_NE(message.find("it was written to"), std::string::npos) << message;
}

TEST_F(MappedFileTest, KeepsReadingAReplacedOrRemovedFile) {
  put("old content");
  const MappedFile file("data", path_);
  std::ofstream(path_ + ".new") << "something else";
  fs::rename(path_ + ".new", path_);
  file.require_unchanged();
  EXPECT_EQ(file.at<char>(0), 'o');
  fs::remove(path_);
  file.require_unchanged();
  EXPECT_EQ(file.at<char>(10), 't');
}

TEST_F(MappedFileTest, ErrorsGiveTheReason) {
  EXPECT_NE(error_text(ErrorKind::kInput, [&] { MappedFile("data", path_); }).find("No such file"), std::string::npos);
  EXPECT_NE(error_text(ErrorKind::kInput, [&] { MappedFile("data", "/tmp"); }).find("no regular file"),
            std::string::npos);
  EXPECT_NE(error_text(ErrorKind::kInput, [&] { MappedFile("data", "/dev/null"); }).find("no regular"),
            std::string::npos);
}

TEST_F(MappedFileTest, ThousandsCanBeOpenAtOnce) {
  put("x");
  in_child([&]() -> std::string {
    std::vector<std::unique_ptr<MappedFile>> files;
    for (int i = 0; i < 5000; ++i) files.push_back(std::make_unique<MappedFile>("data", path_));
    return files.back()->at<char>(0) == 'x' ? "" : "not read";
  });
}

// Faults at other addresses, and raised signals, go to the handler that was installed before.
TEST_F(MappedFileTest, LeavesOtherFaultsAlone) {
  put(pages(2));
  for (const bool sent : {false, true}) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      signal(SIGBUS, [](int) { _exit(77); });
      const MappedFile file("data", path_);
      file.at<char>(0);
      if (sent) {
        raise(SIGBUS);
        _exit(1);
      }
      const int fd = open(path_.c_str(), O_RDONLY);
      const auto* data = static_cast<const volatile char*>(mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0));
      if (truncate(path_.c_str(), 0) != 0) _exit(2);
      _exit(data[4096] == 'x' ? 3 : 4);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << status;
    EXPECT_EQ(WEXITSTATUS(status), 77);
    put(pages(2));
  }
}

}  // namespace
}  // namespace annulus::mapped_file_test
