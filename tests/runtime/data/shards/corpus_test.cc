// Tests of runtime/data/shards/corpus.h: the files of a source read as one sequence of documents.
#include "runtime/data/shards/corpus.h"

#include <gtest/gtest.h>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/token_writers.h"

namespace annulus::corpus_test {
namespace {

namespace fs = std::filesystem;

class CorpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "corpus";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void put(const std::string& name, const std::string& bytes) { put_file(root_ + "/" + name, bytes); }

  SourceConfig source(const std::vector<std::string>& names) {
    SourceConfig s;
    for (const std::string& name : names) s.files.push_back(root_ + "/" + name);
    return s;
  }

  std::string refusal(const SourceConfig& s) {
    return error_text(ErrorKind::kInput, [&] { Corpus corpus(s); });
  }

  std::string root_;
};

Ids all_of(const Corpus& corpus) {
  Ids ids(static_cast<size_t>(corpus.tokens()));
  corpus.read(0, corpus.tokens(), ids.data());
  return ids;
}

Documents documents_of(const Corpus& corpus) {
  Documents documents;
  corpus.visit_documents(true, [&](int64_t begin, int64_t length, uint64_t hash) {
    Ids ids(static_cast<size_t>(length));
    corpus.read(begin, length, ids.data());
    EXPECT_EQ(hash, hash_of(ids));
    documents.push_back(ids);
  });
  EXPECT_EQ(joined(documents), all_of(corpus));
  return documents;
}

void expect_in(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& split : parts) EXPECT_NE(text.find(split), std::string::npos) << split << "\nin: " << text;
}

TEST_F(CorpusTest, JoinsFilesOfAllFormatsWithoutDuplicates) {
  put("a.tokens", annulus_shard({{1, 2}, {}, {3}}, 2, 100));
  put_megatron(root_ + "/m", {{4, 5}, {6}}, 4);
  put("l.bin", llmc_shard({{50256, 7}, {50256, 8}}, 20240520, 1));
  fs::create_symlink(root_ + "/a.tokens", root_ + "/link.tokens");
  const Corpus corpus(source({"l.bin", "*.tokens", "m", "m.*", "a.tokens"}));
  EXPECT_EQ(documents_of(corpus), (Documents{{50256, 7}, {50256, 8}, {1, 2}, {}, {3}, {4, 5}, {6}}));
  EXPECT_EQ(corpus.files(), 3);
  EXPECT_EQ(corpus.text(), "3 files, 10 tokens");
  EXPECT_FALSE(corpus.is_text());
  EXPECT_EQ(corpus.vocab(), std::nullopt);
  EXPECT_EQ(corpus.tokenizer(), "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a");
  EXPECT_EQ(corpus.folder(), root_);
  EXPECT_EQ(corpus.where(5), root_ + "/a.tokens, token 1 (byte 4,098)");
  EXPECT_EQ(corpus.where(9), root_ + "/m.bin, token 2 (byte 8)");
  Ids split(6);
  corpus.read(3, 6, split.data());
  EXPECT_EQ(split, (Ids{8, 1, 2, 3, 4, 5}));
  corpus.verify();
}

TEST_F(CorpusTest, ReadsAtMostTheTokenLimit) {
  put("a.tokens", annulus_shard({{1, 2}, {3, 4, 5}, {6}}, 2, 100));
  put("b.tokens", annulus_shard({{7}}, 2, 50));
  EXPECT_EQ(documents_of(Corpus(source({"*.tokens"}), 4)), (Documents{{1, 2}, {3, 4}}));
  EXPECT_EQ(documents_of(Corpus(source({"*.tokens"}), 6)), (Documents{{1, 2}, {3, 4, 5}, {6}}));
  EXPECT_EQ(Corpus(source({"*.tokens"}), 6).files(), 1);
  EXPECT_EQ(documents_of(Corpus(source({"*.tokens"}), 100)).size(), 4u);
  EXPECT_EQ(Corpus(source({"*.tokens"})).vocab(), 100);
}

TEST_F(CorpusTest, ErrorsNameTheOffendingFile) {
  put("a.tokens", annulus_shard({{1}}, 2, 10));
  put("b.tokens", annulus_shard({{1}}, 2, 10, std::string(16, '\x11')));
  put("e.txt", "");
  expect_in(refusal(source({"*.tokens"})), {"b.tokens was made with another tokenizer (1111", "a.tokens (5a5a"});
  put("t.txt", "x");
  for (const std::vector<std::string>& names : {std::vector<std::string>{"a.tokens", "t.txt"}, {"t.txt", "a.tokens"}}) {
    expect_in(refusal(source(names)), {"t.txt is text, whose tokens are its bytes", "a.tokens holds the tokens"});
  }
  expect_in(refusal(source({"e.txt"})), {"e.txt is empty"});
  expect_in(refusal(source({"none"})), {"there is no file"});
}

TEST_F(CorpusTest, RefusesFilesThatChange) {
  put("a.tokens", annulus_shard({{1, 2}}, 2, 10));
  put("b.tokens", annulus_shard({{3, 4}}, 2, 10));
  const Corpus corpus(source({"*.tokens"}));
  std::fstream(root_ + "/b.tokens", std::ios::binary | std::ios::in | std::ios::out) << "A";
  Ids ids(4);
  corpus.read(0, 2, ids.data());
  expect_error(ErrorKind::kInput, {"b.tokens has changed since the run began"}, [&] { corpus.read(0, 4, ids.data()); });
}

TEST_F(CorpusTest, FingerprintDependsOnTokensAndDocumentsNotNames) {
  const auto print = [&](const std::string& name, const std::string& bytes, int64_t end = -1) {
    put(name, bytes);
    SourceConfig s = source({name});
    s.end = end;
    if (name.ends_with(".bin")) s.format = "nanogpt";
    return Corpus(s).fingerprint();
  };
  const std::string first = print("a.tokens", annulus_shard({{1, 2}, {3}}, 2, 10));
  EXPECT_EQ(first, print("b.tokens", annulus_shard({{1, 2}, {3}}, 2, 10)));
  EXPECT_NE(first, print("b.tokens", annulus_shard({{1, 2}, {4}}, 2, 10)));
  EXPECT_NE(first, print("b.tokens", annulus_shard({{1}, {2, 3}}, 2, 10)));
  EXPECT_NE(print("n.bin", raw_tokens({{1, 2, 3}}, 2)), print("n.bin", raw_tokens({{1, 2, 3}}, 2), 2));
}

}  // namespace
}  // namespace annulus::corpus_test
