// Tests of runtime/huggingface/model_files.h: the check of a folder's tokenizer against the model and the data, and the
// files that are copied unchanged.
#include "runtime/huggingface/model_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "common/checksum.h"
#include "common/error.h"
#include "runtime/huggingface/byte_tokenizer.h"
#include "tests/common/faulty_files.h"
#include "tests/runtime/huggingface/folders.h"

namespace annulus::model_files_test {
namespace {

const char* const kTokenizer = R"({"version": "1.0", "added_tokens": [{"id": 12, "content": "<end>"}],
  "model": {"type": "BPE", "vocab": {"a": 0, "": 3, "b": 10}, "merges": [["a", "b"]], "id": 99}})";

std::string with_tokenizer(const std::string& text = kTokenizer) {
  const std::string folder = fresh_folder("tokenizer");
  write_text(folder + "/tokenizer.json", text);
  return folder;
}

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return std::string(error.message());
  }
  return "nothing";
}

TEST(ModelFiles, CountsTheIdsOfATokenizer) {
  EXPECT_EQ(tokenizer_ids(with_tokenizer() + "/tokenizer.json"), 13);
  EXPECT_EQ(tokenizer_ids(with_tokenizer(R"({"model": {"type": "Unigram", "vocab": [["a", -1.5], ["b", 2]]}})") +
                          "/tokenizer.json"),
            2);
  const std::string pieces =
      R"({"added_tokens": [{"id": 0}, {"id": 1}], "model": {"vocab": [["a", 0], ["b", 0], ["c", 0]]}})";
  EXPECT_EQ(tokenizer_ids(with_tokenizer(pieces) + "/tokenizer.json"), 3) << "the added ids are ids of pieces";
  for (const std::string& text :
       {std::string("{"), std::string("{}"), std::string(R"({"model": {"vocab": {}}})"), std::string(100000, '[')}) {
    const std::string path = with_tokenizer(text) + "/tokenizer.json";
    EXPECT_NE(refusal([&] { tokenizer_ids(path); }).find(path + ": not a tokenizer.json"), std::string::npos) << text;
  }
}

TEST(ModelFiles, ChecksTheTokenizerAgainstModelAndData) {
  const std::string folder = with_tokenizer(), text = kTokenizer;
  const std::string digest = checksum(text.data(), text.size());
  EXPECT_EQ(check_tokenizer(folder, 13, false, digest), "its tokenizer is the data's");
  EXPECT_EQ(check_tokenizer(folder, 20, false, ""), "the data do not say with which tokenizer they were made");
  const auto says = [&](int64_t vocab, bool is_text, const std::string& data) {
    return refusal([&] { check_tokenizer(folder, vocab, is_text, data); });
  };
  EXPECT_NE(says(12, false, digest).find("go up to 12, but config.json beside it says vocab_size 12"),
            std::string::npos);
  EXPECT_NE(says(13, true, "").find("tokens are bytes"), std::string::npos);
  const std::string other = says(13, false, "0123456789abcdef0123456789abcdef");
  EXPECT_NE(other.find("0123456789abcdef0123456789abcdef"), std::string::npos) << other;
  EXPECT_NE(other.find(folder + "/tokenizer.json has " + digest), std::string::npos) << other;
  write_text(folder + "/tokenizer.model", "pieces");
  EXPECT_EQ(check_tokenizer(folder, 13, false, checksum("pieces", 6)), "its tokenizer is the data's");
  const std::string bytes = with_tokenizer(byte_tokenizer({}, 256).tokenizer);
  EXPECT_EQ(check_tokenizer(bytes, 256, true, ""), "its tokenizer's ids are bytes, as the data's tokens are");
  EXPECT_NE(refusal([&] { check_tokenizer(bytes, 255, true, ""); }).find("vocab_size 255"), std::string::npos);
  EXPECT_NE(refusal([&] { check_tokenizer(bytes, 256, false, digest); }).find("different texts"), std::string::npos);
  EXPECT_EQ(check_tokenizer(fresh_folder("none"), 2, true, ""), "it has no tokenizer to compare with the data's");
}

TEST(ModelFiles, CopiesKnownFilesCompletelyOrNotAtAll) {
  const std::string from = with_tokenizer();
  write_text(from + "/generation_config.json", std::string(3 << 20, 'x'));
  write_text(from + "/secrets.txt", "stays");
  const std::vector<std::string> both = {"generation_config.json", "tokenizer.json"};
  const std::string to = fresh_folder("to");
  EXPECT_EQ(copy_files(passed_files(), from, to), both);
  EXPECT_EQ(copy_files(passed_files(), from, to), std::vector<std::string>()) << "existing files are not overwritten";
  EXPECT_EQ(std::filesystem::file_size(to + "/generation_config.json"), 3U << 20);
  EXPECT_FALSE(std::filesystem::exists(to + "/secrets.txt"));
  for (int fault = 0;; ++fault) {
    const std::string full = fresh_folder("full");
    FaultyFiles files(FaultyFiles::Fault::kFull, fault);
    try {
      copy_files({"generation_config.json"}, from, full, files);
      break;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource);
    }
    for (const auto& entry : std::filesystem::directory_iterator(full)) {
      EXPECT_EQ(std::filesystem::file_size(entry), 3U << 20) << entry;
    }
  }
}

}  // namespace
}  // namespace annulus::model_files_test
