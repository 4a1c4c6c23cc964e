// Tests of runtime/data/shards/find_files.h: the files that an entry of data.train names.
#include "runtime/data/shards/find_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::find_files_test {
namespace {

namespace fs = std::filesystem;
using Paths = std::vector<std::string>;

class FindFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/find [1]";  // the name looks like a glob pattern
    fs::remove_all(root_);
    fs::create_directories(root_);
    before_ = fs::current_path();
    fs::current_path(root_);
  }
  void TearDown() override {
    fs::current_path(before_);
    ::unsetenv("ANNULUS_LIBTORCH");
  }

  void put(const std::string& path, const std::string& bytes) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path, std::ios::binary) << bytes;
  }

  void expect_refused(const std::string& entry, const Paths& parts) {
    SCOPED_TRACE(entry);
    expect_error(ErrorKind::kInput, parts, [&] { find_files(entry); });
  }

  std::string root_;
  fs::path before_;
};

TEST_F(FindFiles, GlobSkipsOtherFilesBesideShards) {
  for (const std::string name : {"shard-00000.tokens", "rows-0123.index", "tokens.table", "tokenization.json",
                                 "tokenizer.json", "tokenizer.model"}) {
    put("shards/" + name, "x");
    put("texts/" + name, "x");
  }
  fs::remove(root_ + "/texts/tokenization.json");
  EXPECT_EQ(find_files("shards/*"), (Paths{"shards/shard-00000.tokens"}));
  EXPECT_EQ(find_files("texts/*.json"), (Paths{"texts/tokenizer.json"})) << "this folder has no shards";
  EXPECT_EQ(find_files("shards/tokenizer.json"), (Paths{"shards/tokenizer.json"})) << "it was named explicitly";
}

TEST_F(FindFiles, FindsByNameAndGlob) {
  for (const std::string path :
       {"b.txt", "a.txt", "a.md", "sub/c.txt", "sub/deep/d.txt", ".hidden/e.txt", ".f.txt", "s[x].txt"}) {
    put(path, "x");
  }
  fs::create_directory_symlink(root_, root_ + "/sub/loop");
  EXPECT_EQ(find_files("*.txt"), (Paths{"a.txt", "b.txt", "s[x].txt"}));
  EXPECT_EQ(find_files("./?.txt"), (Paths{"./a.txt", "./b.txt"}));
  EXPECT_EQ(find_files("**/*.txt"), (Paths{"a.txt", "b.txt", "s[x].txt", "sub/c.txt", "sub/deep/d.txt"}));
  EXPECT_EQ(find_files("sub/**"), (Paths{"sub/c.txt", "sub/deep/d.txt"}));
  EXPECT_EQ(find_files("*/[cd].txt"), (Paths{"sub/c.txt"}));
  EXPECT_EQ(find_files("s[x].txt"), (Paths{"s[x].txt"}));
  EXPECT_EQ(find_files(".hidden/*.txt"), (Paths{".hidden/e.txt"}));
  EXPECT_EQ(find_files(root_ + "/a.txt"), (Paths{root_ + "/a.txt"}));
  ::setenv("HOME", root_.c_str(), 1);
  EXPECT_EQ(find_files("~/a.md"), (Paths{root_ + "/a.md"}));
}

TEST_F(FindFiles, ErrorsNameTheEntryAndTheReason) {
  expect_refused("none.txt", {"[data] data.train", "none.txt", "no file"});
  expect_refused("*.md", {"*.md", "matches no file"});
  expect_refused(".", {"is a folder", "**/*.txt", "./*.tokens"});
  expect_refused("python_sources", {"did you mean \"python-sources\"?"});
  expect_refused("/dev/null", {"not a regular file"});
}

// Training without a file that the user named would be noticed by nobody.
TEST_F(FindFiles, GlobRefusesWhatCannotBeReadAsAFile) {
  put("a.txt", "x");
  put("sub/c.txt", "x");
  fs::create_symlink(root_ + "/a.txt", root_ + "/link.txt");
  fs::create_symlink("sub", root_ + "/folder.txt");
  EXPECT_EQ(find_files("*.txt"), (Paths{"a.txt", "link.txt"})) << "a link to a file is one, a folder matches nothing";
  fs::create_symlink("gone", root_ + "/b.txt");
  for (const std::string pattern : {"*.txt", "**/*.txt", "**", "?.txt"}) {
    expect_refused(pattern, {"\"" + pattern + "\" matches b.txt, a link to a file that is not there: repair"});
  }
  expect_refused("*/c.txt", {"matches b.txt, a link to a file that is not there"});
  EXPECT_EQ(find_files("[al]*.txt"), (Paths{"a.txt", "link.txt"})) << "the pattern leaves it out";
  fs::remove(root_ + "/b.txt");
  fs::remove(root_ + "/folder.txt");
  ASSERT_EQ(::mkfifo((root_ + "/sub/pipe.txt").c_str(), 0600), 0);
  for (const std::string pattern : {"**/*.txt", "*/pipe.txt", "sub/*"}) {
    expect_refused(pattern, {"matches sub/pipe.txt, a pipe (FIFO): "});
  }
  fs::create_symlink("circle.txt", root_ + "/sub/circle.txt");
  expect_refused("sub/*", {"matches sub/circle.txt, about which the system says: ", "symbolic links, and 1 other"});
  expect_refused("/dev/nul[l]", {"matches /dev/null, a device or socket"});
}

TEST_F(FindFiles, FindsAMegatronPairByItsPrefix) {
  put("corpus.idx", "x");
  expect_refused("corpus", {"no file corpus"});
  put("corpus.bin", "x");
  EXPECT_EQ(find_files("corpus"), (Paths{"corpus.idx"}));
  put("corpus", "a file of this name comes first");
  EXPECT_EQ(find_files("corpus"), (Paths{"corpus"}));
}

TEST_F(FindFiles, PythonSourcesComeFromLibTorchOrTheSystem) {
  put("torch/b.py", "import a");
  put("torch/sub/a.py", "x = 1");
  put("torch/lib/notes.txt", "x");
  ::setenv("ANNULUS_LIBTORCH", (root_ + "/torch").c_str(), 1);
  EXPECT_EQ(find_files("python-sources"), (Paths{root_ + "/torch/b.py", root_ + "/torch/sub/a.py"}));
  // If the folder of LibTorch has no Python files, the system's are used. Without the variable, it is the folder from
  // which LibTorch was loaded.
  ::setenv("ANNULUS_LIBTORCH", (root_ + "/torch/lib").c_str(), 1);
  for (int i = 0; i < 2; ++i) {
    const Paths files = find_files("python-sources");
    EXPECT_GT(files.size(), 100u);
    EXPECT_TRUE(std::is_sorted(files.begin(), files.end()));
    for (const std::string& file : files) EXPECT_TRUE(file.ends_with(".py")) << file;
    ::unsetenv("ANNULUS_LIBTORCH");
  }
}

}  // namespace
}  // namespace annulus::find_files_test
