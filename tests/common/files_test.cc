// Tests of common/files.h.
#include "common/files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "common/error.h"
#include "common/text.h"
#include "tests/common/faulty_files.h"

namespace annulus::files_test {
namespace {

std::string content(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

std::string fresh_folder(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

size_t entries(const std::string& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(Files, ReplacesAWholeFile) {
  const std::string path = fresh_folder("replace") + "/a";
  write_atomically(FileSystem::real(), path, "first");
  write_atomically(FileSystem::real(), path, "second, longer");
  EXPECT_EQ(content(path), "second, longer");
  EXPECT_EQ(entries(folder_of(path)), 1u);
}

TEST(Files, FailuresNameThePath) {
  const auto kind_and_text = [](auto&& call) -> std::pair<int, std::string> {
    try {
      call();
    } catch (const Error& error) {
      return {error.exit_code(), error.what()};
    }
    return {0, ""};
  };
  const auto [kind, text] = kind_and_text([] { write_atomically(FileSystem::real(), "/nonexistent/x", "y"); });
  EXPECT_EQ(kind, static_cast<int>(ErrorKind::kResource));
  EXPECT_NE(text.find("/nonexistent/x"), std::string::npos) << text;
  // A device that is always full.
  const auto [full, why] = kind_and_text([] {
    auto file = FileSystem::real().create("/dev/full");
    file->write("x", 1);
  });
  EXPECT_EQ(full, static_cast<int>(ErrorKind::kResource));
  EXPECT_NE(why.find("space"), std::string::npos) << why;
}

TEST(Files, WriteFullyWaitsForANonblockingPipe) {
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe2(ends.data(), O_NONBLOCK | O_CLOEXEC), 0);
  const std::string text(size_t{1} << 20, 'x');  // more than a pipe holds
  size_t came = 0;
  std::thread reader([&] {
    std::array<char, 4096> part{};
    for (pollfd readable{ends[0], POLLIN, 0}; came < text.size() && poll(&readable, 1, -1) == 1;) {
      if (const ssize_t n = read(ends[0], part.data(), part.size()); n > 0) came += static_cast<size_t>(n);
    }
  });
  EXPECT_EQ(write_fully(ends[1], text), 0);
  reader.join();
  EXPECT_EQ(came, text.size());
  close(ends[1]);
  EXPECT_EQ(write_fully(ends[0], "a"), EBADF) << "the end for reading";
  close(ends[0]);
}

TEST(Files, FolderOfGivesTheParent) {
  EXPECT_EQ(folder_of("a"), ".");
  EXPECT_EQ(folder_of("b/a"), "b");
  EXPECT_EQ(folder_of("/a"), "/");
}

TEST(Files, ErrnoDecidesTheKindOfError) {
  for (const int reason : {0, ENOENT, ENOTDIR, EISDIR, ELOOP}) {
    EXPECT_EQ(kind_of_errno(reason), ErrorKind::kInput) << std::strerror(reason);
  }
  for (const int reason : {EACCES, EPERM, EROFS, EIO, ENOSPC, EMFILE, ENOMEM}) {
    EXPECT_EQ(kind_of_errno(reason), ErrorKind::kResource) << std::strerror(reason);
  }
}

TEST(Files, RefusesUnwritableOutputsEarly) {
  const std::string folder = fresh_folder("a user's outputs");
  const auto refusal = [](const std::string& path) -> std::pair<int, std::string> {
    try {
      require_output("test", "--output " + path, path);
    } catch (const Error& error) {
      return {error.exit_code(), error.what()};
    }
    return {0, ""};
  };
  EXPECT_EQ(refusal(folder + "/new").first, 0);
  write_atomically(FileSystem::real(), folder + "/old", "");
  EXPECT_EQ(refusal(folder + "/old").first, 0);
  EXPECT_EQ(refusal(folder), std::pair(2, "[test] --output " + folder + " is a folder: name a file to write"));
  EXPECT_EQ(refusal("/dev/null"),
            std::pair(2, std::string("[test] --output /dev/null is no regular file: name a file to write")));
  const std::string path = folder + "/nowhere/new";
  EXPECT_EQ(refusal(path), std::pair(8, "[test] the folder of --output " + path + " does not exist; make it with: " +
                                            shell_quote({"mkdir", "-p", folder + "/nowhere"})));
}

TEST(Files, EveryFaultLeavesTheOldOrTheNewContent) {
  using Fault = FaultyFiles::Fault;
  for (const Fault fault : {Fault::kFull, Fault::kDeath, Fault::kPower, Fault::kNames}) {
    bool failed = true;
    for (int at = 0; failed; ++at) {
      ASSERT_LT(at, 100);
      const std::string path = fresh_folder("faults") + "/a";
      write_atomically(FileSystem::real(), path, "old");
      FaultyFiles files(fault, at);
      try {
        write_atomically(files, path, "new content");
        EXPECT_FALSE(files.failed());
        files.lose_power();  // what was written stays
      } catch (const Error&) {
        EXPECT_EQ(fault, Fault::kFull);
        EXPECT_EQ(entries(folder_of(path)), 1u) << "left beside it";
      } catch (const FaultyFiles::Dead&) {
        EXPECT_NE(fault, Fault::kFull);
      }
      failed = files.failed();
      const std::string now = content(path);
      EXPECT_TRUE(now == "old" || now == "new content") << now;
      if (!failed) {
        EXPECT_EQ(now, "new content");
      }
    }
  }
}

}  // namespace
}  // namespace annulus::files_test
