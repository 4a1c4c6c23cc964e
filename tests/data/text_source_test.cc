// Tests of data/text_source.h.
#include "data/text_source.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "common/error.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

class TextSourceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/text [1]";  // a name that could be taken for a glob
    fs::remove_all(root_);
    fs::create_directories(root_);
    before_ = fs::current_path();
    fs::current_path(root_);
  }
  void TearDown() override { fs::current_path(before_); }

  void put(const std::string& path, const std::string& bytes) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path, std::ios::binary) << bytes;
  }

  std::string root_;
  fs::path before_;
};

using Paths = std::vector<std::string>;

DataConfig data(const Paths& train, int64_t context = 8, double validation = 0) {
  DataConfig d;
  d.train = train;
  d.context = context;
  d.validation_fraction = validation;
  return d;
}

std::string bytes_of(const at::Tensor& row) {
  std::string out;
  for (int64_t i = 0; i < row.numel(); ++i) out += static_cast<char>(row.data_ptr<int64_t>()[i]);
  return out;
}

std::string refusal(const DataConfig& d) {
  try {
    TextSource(d, 1);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "";
}

void expect_in(const std::string& text, const Paths& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
}

std::string alphabet(size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out += static_cast<char>(i % 251);
  return out;
}

TEST_F(TextSourceTest, RefusalsNameWhatIsWrong) {
  put("a.txt", "0123456789");
  expect_in(refusal(data({"none.txt"})), {"[data]", "none.txt", "no file"});
  expect_in(refusal(data({"a.txt"}, 10)), {"a.txt", "has 10 bytes, a row needs 11"});
  expect_in(refusal(data({"a.txt"}, 2048)), {"2,049"});
  expect_in(refusal(data({"a.txt"}, 7, 0.3)), {"training part", "has 7 bytes, a row needs 8"});
  expect_in(refusal(data({"a.txt"}, 5, 0.1)), {"validation part", "has 1 bytes, a row needs 6"});
  expect_in(refusal(data({"a.txt"}, int64_t{1} << 40)), {"1,099,511,627,777"});
}

TEST_F(TextSourceTest, FilesFollowEachOtherOnce) {
  put("a", "abcde");
  put("b", "");
  put("c", "fg");
  put("z", "first");
  fs::create_symlink(root_ + "/a", root_ + "/link");
  const TextSource text(data({"z", "*"}, 11), 1);
  EXPECT_EQ(text.files(), 4);
  EXPECT_EQ(text.bytes(), 12);
  EXPECT_EQ(bytes_of(text.sample(0, 0)), "firstabcdefg");
  EXPECT_EQ(text.text(), "4 files, 12 bytes (0 for validation)");
  DataConfig limited = data({"z", "*"}, 6);
  limited.max_bytes = 7;
  EXPECT_EQ(bytes_of(TextSource(limited, 1).sample(0, 0)), "firstab");
}

TEST_F(TextSourceTest, RowsAreCutFromTheTextAndDependOnSeedStepAndRowAlone) {
  const std::string all = alphabet(5000);
  for (int i = 0; i < 5; ++i) put("part" + std::to_string(i), all.substr(i * 1000, 1000));
  const TextSource text(data({"part*"}, 100, 0.2), 7);
  EXPECT_EQ(text.text(), "5 files, 5,000 bytes (1,000 for validation)");
  std::set<std::string> starts;
  for (int64_t step = 0; step < 20; ++step) {
    for (int64_t row = 0; row < 4; ++row) {
      const at::Tensor tokens = text.sample(step, row);
      EXPECT_EQ(tokens.sizes(), at::IntArrayRef({101}));
      EXPECT_EQ(tokens.scalar_type(), at::kLong);
      const std::string bytes = bytes_of(tokens);
      EXPECT_NE(all.substr(0, 4000).find(bytes), std::string::npos);
      starts.insert(bytes);
      EXPECT_TRUE(at::equal(tokens, TextSource(data({"part*"}, 100, 0.2), 7).sample(step, row)));
    }
  }
  EXPECT_GT(starts.size(), 40u);
  EXPECT_FALSE(at::equal(text.sample(3, 1), TextSource(data({"part*"}, 100, 0.2), 8).sample(3, 1)));
}

TEST_F(TextSourceTest, EveryPlaceIsDrawn) {
  put("a", alphabet(20));
  const TextSource text(data({"a"}, 15), 1);
  std::set<char> first;
  for (int64_t step = 0; step < 200; ++step) first.insert(bytes_of(text.sample(step, 0))[0]);
  EXPECT_EQ(first, (std::set<char>{0, 1, 2, 3, 4}));
}

TEST_F(TextSourceTest, TheValidationPartIsRoundedUp) {
  const std::string all = alphabet(1001);
  put("a", all);
  const TextSource text(data({"a"}, 9, 0.25), 1);  // 250.25 bytes
  EXPECT_EQ(text.text(), "1 file, 1,001 bytes (251 for validation)");
  EXPECT_EQ(bytes_of(text.validation_row(0, 5)), all.substr(750, 10));
  EXPECT_EQ(bytes_of(text.validation_row(4, 5)), all.substr(991, 10));
}

TEST_F(TextSourceTest, ValidationRowsSpreadOverTheTail) {
  const std::string all = alphabet(1000);
  put("a", all);
  const TextSource text(data({"a"}, 9, 0.25), 1);
  ASSERT_TRUE(text.has_validation());
  EXPECT_EQ(bytes_of(text.validation_row(0, 5)), all.substr(750, 10));
  EXPECT_EQ(bytes_of(text.validation_row(2, 5)), all.substr(870, 10));
  EXPECT_EQ(bytes_of(text.validation_row(4, 5)), all.substr(990, 10));
  EXPECT_EQ(bytes_of(text.validation_row(0, 1)), all.substr(750, 10));
  EXPECT_THROW(text.validation_row(5, 5), Error);
}

TEST_F(TextSourceTest, RowsKnowTheirDocuments) {
  const std::vector<int64_t> lengths = {7, 1, 0, 40, 3, 0, 0, 29};
  std::string all = alphabet(80);
  for (size_t i = 0, at = 0; i < lengths.size(); at += static_cast<size_t>(lengths[i++])) {
    put("part" + std::to_string(i), all.substr(at, static_cast<size_t>(lengths[i])));
  }
  const TextSource text(data({"part*"}, 12, 0.3), 1);
  const auto expect_right = [&](const at::Tensor& row, const std::vector<int64_t>& documents) {
    const auto begin = static_cast<int64_t>(all.find(bytes_of(row)));
    std::vector<int64_t> want;
    int64_t file_begin = 0;
    for (const int64_t length : lengths) {
      const int64_t inside = std::min(begin + 12, file_begin + length) - std::max(begin, file_begin);
      if (inside > 0) want.push_back(inside);
      file_begin += length;
    }
    EXPECT_EQ(documents, want) << begin;
  };
  for (int64_t step = 0; step < 100; ++step) expect_right(text.sample(step, 1), text.sample_documents(step, 1));
  for (int64_t i = 0; i < 12; ++i) expect_right(text.validation_row(i, 12), text.validation_documents(i, 12));
}

TEST_F(TextSourceTest, FingerprintSeesEveryByteButNoFolder) {
  put("one/a", alphabet(500));
  put("two/a", alphabet(500));
  const std::string print = TextSource(data({"one/*"}), 1).fingerprint();
  EXPECT_EQ(print, TextSource(data({"two/*"}), 2).fingerprint());
  std::string other = alphabet(500);
  other[321] ^= 1;
  put("two/a", other);
  EXPECT_NE(print, TextSource(data({"two/*"}), 1).fingerprint());
}

TEST_F(TextSourceTest, LongTextsAreReadFromTheFiles) {
  // A hole of 300 MiB costs no disk: more than is kept in memory.
  put("a", "begin");
  put("b", "x");
  put("c", "the end of it");
  fs::resize_file(root_ + "/b", 300 << 20);
  const TextSource text(data({"a", "b", "c"}, 19, 0.001), 1);
  EXPECT_EQ(bytes_of(text.validation_row(1, 2)), std::string(7, '\0') + "the end of it");
  EXPECT_EQ(text.sample(0, 0).numel(), 20);
  fs::resize_file(root_ + "/c", 3);
  try {
    text.validation_row(1, 2);
    ADD_FAILURE();
  } catch (const Error& error) {
    expect_in(error.what(), {"c has become shorter"});
  }
}

}  // namespace
}  // namespace annulus
