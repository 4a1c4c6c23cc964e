// Tests of runtime/data/shards/token_file.h: reading and refusing files of every token format.
#include "runtime/data/shards/token_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "runtime/data/shards/tokenization.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/token_writers.h"

namespace annulus::token_file_test {
namespace {

namespace fs = std::filesystem;

class TokenFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/tokens";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }

  std::string put(const std::string& name, const std::string& bytes) {
    put_file(root_ + "/" + name, bytes);
    return root_ + "/" + name;
  }

  std::string root_;
};

SourceConfig source(const std::string& format = "auto", int64_t width = 0, int64_t begin = -1, int64_t end = -1) {
  SourceConfig s;
  s.format = format;
  s.width = width;
  s.begin = begin;
  s.end = end;
  return s;
}

Ids all_of(const TokenFile& file) {
  Ids ids(static_cast<size_t>(file.tokens()));
  file.read(0, file.tokens(), ids.data());
  return ids;
}

Documents documents_of(const TokenFile& file, int64_t limit = -1) {
  Documents documents;
  int64_t end = 0;
  file.visit_documents(
      true,
      [&](int64_t begin, int64_t length, uint64_t hash) {
        EXPECT_EQ(begin, end);
        Ids ids(static_cast<size_t>(length));
        file.read(begin, length, ids.data());
        EXPECT_EQ(hash, hash_of(ids)) << "of document " << documents.size();
        documents.push_back(ids);
        end = begin + length;
      },
      limit);
  EXPECT_EQ(end, limit < 0 ? file.tokens() : std::min(limit, file.tokens()));
  size_t unhashed = 0;
  file.visit_documents(
      false,
      [&](int64_t, int64_t length, uint64_t hash) {
        EXPECT_EQ(hash, 0u);
        EXPECT_EQ(static_cast<size_t>(length), documents.at(unhashed++).size());
      },
      limit);
  EXPECT_EQ(unhashed, documents.size());
  return documents;
}

void expect_refused(const std::function<void()>& body, const std::vector<std::string>& parts) {
  const std::string message = error_text(ErrorKind::kInput, body);
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << "\nin: " << message;
}

void expect_refused(const std::string& path, const SourceConfig& s, std::vector<std::string> parts) {
  parts.push_back(path);
  expect_refused([&] { TokenFile::open(path, s); }, parts);
}

// Documents long enough for several reads, with ids of every size, empty documents and documents of one token.
Documents sample(int64_t vocab) {
  Documents documents;
  int64_t id = 1;
  for (const size_t length : {3u, 0u, 1u, 9000u, 0u, 0u, 4096u, 1u, 2u}) {
    Ids ids;
    for (size_t i = 0; i < length; ++i) ids.push_back((id = id * 48271 % 2147483647) % vocab);
    documents.push_back(ids);
  }
  return documents;
}

TEST_F(TokenFileTest, TextTokensAreItsBytes) {
  const std::string text("a\0\xff\n", 4);
  const auto file = TokenFile::open(put("a.txt", text), source());
  EXPECT_EQ(file->format(), TokenFormat::kText);
  EXPECT_EQ(all_of(*file), (Ids{'a', 0, 255, '\n'}));
  EXPECT_EQ(documents_of(*file), (Documents{{'a', 0, 255, '\n'}}));
  EXPECT_EQ(documents_of(*file, 2), (Documents{{'a', 0}}));
  EXPECT_EQ(file->vocab(), 256);
  file->verify();
  EXPECT_EQ(documents_of(*TokenFile::open(put("empty", ""), source())), (Documents{{}}));
  std::string longer;
  for (int i = 0; i < 200000; ++i) longer += static_cast<char>(i % 251);
  const auto long_file = TokenFile::open(put("long.txt", longer), source());
  const Ids ids = all_of(*long_file);
  for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(ids[i], static_cast<int64_t>(i % 251));
}

TEST_F(TokenFileTest, ReadsAnnulusShardsOfBothWidths) {
  for (const int width : {2, 4}) {
    const int64_t vocab = width == 2 ? 65536 : 200000;
    const Documents documents = sample(vocab);
    const auto file =
        TokenFile::open(put("s.tokens", annulus_shard(documents, width, static_cast<uint64_t>(vocab))), source());
    EXPECT_EQ(file->format(), TokenFormat::kAnnulus);
    EXPECT_EQ(file->bits(), 8 * width);
    EXPECT_EQ(file->vocab(), vocab);
    EXPECT_EQ(file->documents(), 9);
    EXPECT_EQ(file->tokenizer(), "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a");
    EXPECT_EQ(all_of(*file), joined(documents));
    EXPECT_EQ(documents_of(*file), documents);
    EXPECT_EQ(documents_of(*file, 5), (Documents{documents[0], {}, documents[2], {documents[3][0]}}));
    Ids part(5000);
    file->read(4000, 5000, part.data());
    const Ids all = joined(documents);
    EXPECT_EQ(part, Ids(all.begin() + 4000, all.begin() + 9000));
    file->verify();
  }
  const auto empty = TokenFile::open(put("e.tokens", annulus_shard({}, 2, 10)), source());
  EXPECT_EQ(documents_of(*empty), Documents{});
  empty->verify();
  EXPECT_EQ(documents_of(*TokenFile::open(put("f.tokens", annulus_shard({{}, {}}, 2, 10)), source())),
            (Documents{{}, {}}));
}

TEST_F(TokenFileTest, RefusesInvalidAnnulusShards) {
  const std::string good = annulus_shard(sample(1000), 2, 1000);
  const auto with = [&](size_t at, auto value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return put("s.tokens", bytes);
  };
  const auto s = source();
  expect_refused(put("s.tokens", good.substr(0, 100)), s, {"less than its header"});
  expect_refused(put("s.tokens", good.substr(0, good.size() - 8)), s, {"does not fit"});
  expect_refused(put("s.tokens", good + "x"), s, {"does not fit"});
  expect_refused(with(8, uint32_t{4}), s, {"version 4", "only versions 1 to 3 are read"});
  expect_refused(with(8, uint32_t{2}), s, {"does not fit"});
  expect_refused(with(12, uint32_t{3}), s, {"a token has 3 bytes"});
  expect_refused(with(12, uint32_t{4}), s, {"does not fit"});
  for (const size_t at : {16u, 24u, 40u, 48u}) {
    for (const uint64_t value : {uint64_t{1}, uint64_t{1} << 40, uint64_t{1} << 61, ~uint64_t{0}}) {
      expect_refused(with(at, value), s, {"does not fit"});
    }
  }
  uint64_t offsets = 0;
  std::memcpy(&offsets, good.data() + 40, 8);
  expect_refused(with(offsets, uint64_t{1}), s, {"documents do not cover"});
  expect_refused(with(offsets + 9 * 8, uint64_t{1}), s, {"documents do not cover"});
  for (const uint64_t value : {uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0}}) {
    const auto file = TokenFile::open(with(offsets + 3 * 8, value), s);
    expect_refused([&] { documents_of(*file); }, {"s.tokens", "document 2 ends at token"});
  }
  // verify() reads what opening does not.
  expect_refused([&] { TokenFile::open(with(5000, char{1}), s)->verify(); }, {"checksum"});
  std::string wrong_hash = good;
  wrong_hash.back() = static_cast<char>(wrong_hash.back() + 1);
  const std::string sum = checksum(wrong_hash.data() + 4096, wrong_hash.size() - 4096);
  for (size_t i = 0; i < 16; ++i) wrong_hash[72 + i] = static_cast<char>(std::stoi(sum.substr(2 * i, 2), nullptr, 16));
  expect_refused([&] { TokenFile::open(put("h.tokens", wrong_hash), s)->verify(); }, {"document 8"});
  const auto small = TokenFile::open(put("v.tokens", annulus_shard({{1, 2}, {3, 20}}, 2, 10)), s);
  expect_refused([&] { small->verify(); }, {"token 3 (byte 4,102) is 20", "the vocabulary has 10 ids"});
}

TEST_F(TokenFileTest, ReadsMegatronPairsByEitherName) {
  for (const int width : {2, 4}) {
    const Documents documents = sample(width == 2 ? 65536 : 200000);
    put_megatron(root_ + "/corpus", documents, width);
    for (const std::string name : {"corpus.idx", "corpus.bin"}) {
      for (const std::string format : {"auto", "megatron"}) {
        const auto file = TokenFile::open(root_ + "/" + name, source(format));
        EXPECT_EQ(file->format(), TokenFormat::kMegatron);
        EXPECT_EQ(file->path(), root_ + "/corpus.idx");
        EXPECT_EQ(file->bits(), 8 * width);
        EXPECT_EQ(all_of(*file), joined(documents));
        EXPECT_EQ(documents_of(*file), documents);
        EXPECT_EQ(documents_of(*file, 4).size(), 3u);
        file->verify();
      }
    }
  }
}

TEST_F(TokenFileTest, ReadsMegatronDocumentsOfSeveralSequences) {
  put("m.bin", raw_tokens({{1, 2, 3, 4, 5, 6, 7}}, 2));
  // The documents have two sequences, none, and three (one of them empty); the index has a mode for each sequence.
  put("m.idx", megatron_index({2, 1, 3, 0, 1}, {2, 0, 3}, 2, 8) + std::string(5, '\0'));
  const auto file = TokenFile::open(root_ + "/m.idx", source());
  EXPECT_EQ(documents_of(*file), (Documents{{1, 2, 3}, {}, {4, 5, 6, 7}}));
  EXPECT_EQ(documents_of(*file, 3), (Documents{{1, 2, 3}}));
  EXPECT_EQ(documents_of(*file, 2), (Documents{{1, 2}}));
  file->verify();
  put("e.bin", "");
  put("e.idx", megatron_index({}, {}, 2, 8));
  EXPECT_EQ(documents_of(*TokenFile::open(root_ + "/e.idx", source())), Documents{});
}

TEST_F(TokenFileTest, RefusesInconsistentMegatronPairs) {
  const std::string tokens = raw_tokens({{1, 2, 3, 4, 5, 6, 7}}, 2);
  const std::string good = megatron_index({2, 1, 3, 1}, {2, 2}, 2, 8);
  const std::string path = root_ + "/m.idx";
  const auto s = source();
  const auto refuse = [&](const std::string& index, const std::string& data, const std::vector<std::string>& parts) {
    put("m.idx", index);
    put("m.bin", data);
    expect_refused([&] { documents_of(*TokenFile::open(path, s)); }, parts);
  };
  const auto with = [&](size_t at, auto value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return bytes;
  };
  refuse(good, tokens.substr(0, 12), {"m.bin", "does not hold what the .idx says", "written together"});
  refuse(good, tokens + "ab", {"m.bin", "does not hold"});
  refuse(good, tokens + "a", {"m.bin", "not a whole number of tokens of 16 bits"});
  refuse(good.substr(0, 20), tokens, {"m.idx", "less than its header"});
  refuse(good.substr(0, good.size() - 1), tokens, {"m.idx", "says that it has 4 sequences"});
  refuse(good + "x", tokens, {"m.idx", "says that it has 4 sequences"});
  refuse(with(9, uint64_t{2}), tokens, {"m.idx", "version 2"});
  refuse(with(17, uint8_t{4}), tokens, {"m.bin"});
  refuse(with(17, uint8_t{7}), tokens, {"type 7 (float32)"});
  refuse(with(17, uint8_t{99}), tokens, {"type 99,"});
  for (const uint64_t value : {uint64_t{0}, uint64_t{5}, uint64_t{1} << 61, ~uint64_t{0}}) {
    refuse(with(18, value), tokens, {"m.idx", "does not fit"});
    refuse(with(26, value), tokens, {"m.idx", "does not fit"});
  }
  for (const int32_t length : {0, 3, INT32_MAX}) refuse(with(34 + 4, length), tokens, {"sequence 1 of "});
  for (const int64_t pointer : {int64_t{2}, int64_t{100}, INT64_MAX}) {
    refuse(with(34 + 16 + 8, pointer), tokens, {"m.bin", "sequence "});
  }
  for (const int64_t end : {int64_t{5}, INT64_MAX}) {
    refuse(with(34 + 16 + 32 + 8, end), tokens, {"document 0 ends at sequence"});
  }
  refuse(with(34 + 4, int32_t{-1}), tokens, {"m.idx", "length of sequence 1 is negative, -1;"});
  refuse(with(34 + 4, INT32_MIN), tokens, {"length of sequence 1 is negative, -2,147,483,648;"});
  refuse(with(34 + 16 + 8, int64_t{-4}), tokens, {"m.idx", "place of sequence 1 is negative, -4;"});
  refuse(with(34 + 16 + 8, INT64_MIN), tokens, {"place of sequence 1 is negative"});
  refuse(with(34 + 16 + 32 + 8, int64_t{-1}), tokens, {"m.idx", "end of document 0 is negative, -1;"});
  refuse(with(34 + 16 + 32, int64_t{1}), tokens, {"first to its last sequence"});
  refuse(with(34 + 16 + 32 + 16, int64_t{3}), tokens, {"first to its last sequence"});
  fs::remove(root_ + "/m.bin");
  put("m.idx", good);
  expect_refused(path, s, {"its tokens", "m.bin, are missing"});
}

TEST_F(TokenFileTest, MegatronReadsCheckWhatOpeningDoesNot) {
  std::vector<int32_t> lengths(1000, 3);
  put("m.bin", raw_tokens({Ids(3000, 7)}, 2));
  std::string index = megatron_index(lengths, std::vector<int64_t>(1000, 1), 2, 8);
  // Two neighbouring lengths between those that opening samples are wrong, but their sum is right.
  const int32_t changed[2] = {2, 4};
  std::memcpy(index.data() + 34 + 4 * 8, changed, sizeof changed);
  put("m.idx", index);
  const auto file = TokenFile::open(root_ + "/m.idx", source());
  expect_refused([&] { documents_of(*file); }, {"sequence 9 of 4"});
  expect_refused([&] { file->verify(); }, {"sequence 9 of 4"});
}

TEST_F(TokenFileTest, ReadsLlmcShardsOfBothMagics) {
  const Documents old{{50256, 1, 2}, {50256}, {50256, 65535}};
  const auto narrow = TokenFile::open(put("x_train_0.bin", llmc_shard(old, 20240520, 1)), source());
  EXPECT_EQ(narrow->format(), TokenFormat::kLlmc);
  EXPECT_EQ(narrow->bits(), 16);
  EXPECT_EQ(all_of(*narrow), joined(old));
  EXPECT_EQ(documents_of(*narrow), old);
  const Documents wide{{5, 6}, {128000, 70000, 1}, {128000}};  // the first continues another shard's last document
  const auto file = TokenFile::open(put("x_train_1.bin", llmc_shard(wide, 20240801, 7)), source("llmc"));
  EXPECT_EQ(file->bits(), 32);
  EXPECT_EQ(all_of(*file), joined(wide));
  EXPECT_EQ(documents_of(*file), wide);
  EXPECT_EQ(documents_of(*file, 3), (Documents{{5, 6}, {128000}}));
  file->verify();
  // The source's own ids take precedence.
  EXPECT_EQ(documents_of(*TokenFile::open(root_ + "/x_train_1.bin", source("auto", 0, -1, 6))),
            (Documents{{5, 6}, {128000, 70000, 1, 128000}}));
}

TEST_F(TokenFileTest, RefusesInvalidLlmcShards) {
  const std::string good = llmc_shard({{1, 2, 3}}, 20240520, 1);
  const auto s = source();
  expect_refused(put("a.bin", good.substr(0, 1000)), s, {"less than the 1,024", "cut off"});
  expect_refused(put("a.bin", good.substr(0, good.size() - 1)), s, {"holds 3 tokens, which is 1,030", "1,029"});
  expect_refused(put("a.bin", good + "xx"), s, {"1,032"});
  expect_refused(put("a.bin", llmc_shard({{1}}, 20240520, 7)), s, {"version 7", "version 1 is expected"});
  expect_refused(put("a.bin", llmc_shard({{1}}, 20240801, 1)), s, {"version 7 is expected"});
  expect_refused(put("a.bin", llmc_shard({{1}}, 20240522, 1)), s, {"multiple choice"});
  for (const int32_t count : {-1, INT32_MIN}) {
    std::string negative = good;
    std::memcpy(negative.data() + 8, &count, 4);
    expect_refused(put("a.bin", negative), s,
                   {"a.bin has a negative number of tokens in its header of llm.c, " + std::to_string(count),
                    "more tokens than such a header counts, 2,147,483,647: make it again"});
  }
}

TEST_F(TokenFileTest, NanogptFormatComesFromTheSource) {
  const Documents documents{{7, 8, 50256}, {9, 50256}, {1}};
  const std::string path = put("train.bin", raw_tokens(documents, 2));
  expect_refused(path, source(), {"has no mark", "format = \"nanogpt\""});
  const auto file = TokenFile::open(path, source("nanogpt", 0, -1, 50256));
  EXPECT_EQ(file->bits(), 16);
  EXPECT_EQ(documents_of(*file), documents);
  EXPECT_EQ(documents_of(*TokenFile::open(path, source("nanogpt"))), (Documents{joined(documents)}));
  const Documents wide{{70000, 1}, {70000, 2}};
  const std::string wide_path = put("wide.bin", raw_tokens(wide, 4));
  EXPECT_EQ(documents_of(*TokenFile::open(wide_path, source("nanogpt", 32, 70000))), wide);
  expect_refused(put("odd.bin", "abc"), source("nanogpt"),
                 {"3 bytes, which is not a whole number of tokens of 16 bits"});
  expect_refused(put("six.bin", "abcdef"), source("nanogpt", 32), {"of 32 bits", "set width = 16"});
  EXPECT_EQ(documents_of(*TokenFile::open(put("none.bin", ""), source("nanogpt"))), Documents{});
}

TEST_F(TokenFileTest, FindsDocumentsByBeginAndEndIds) {
  const auto found = [&](const Ids& ids, int64_t begin, int64_t end) {
    put("x.bin", raw_tokens({ids}, 2));
    return documents_of(*TokenFile::open(root_ + "/x.bin", source("nanogpt", 16, begin, end)));
  };
  EXPECT_EQ(found({1, 5, 1, 1, 6}, 1, -1), (Documents{{1, 5}, {1}, {1, 6}}));
  EXPECT_EQ(found({5, 2, 2, 6, 2}, -1, 2), (Documents{{5, 2}, {2}, {6, 2}}));
  // With both ids, a begin or end id alone inside a document does not divide it.
  EXPECT_EQ(found({1, 1, 5, 2, 6, 2, 1, 7, 2}, 1, 2), (Documents{{1, 1, 5, 2, 6, 2}, {1, 7, 2}}));
  EXPECT_EQ(found({9, 4, 9, 9, 5, 9}, 9, 9), (Documents{{9, 4, 9}, {9, 5, 9}}));
  // Documents begin at and beside the ends of the pieces that are read at a time.
  Documents documents;
  for (const size_t length : {4096u, 1u, 4095u, 4097u, 8192u}) {
    documents.emplace_back(length, 5);
    documents.back()[0] = 1;
  }
  EXPECT_EQ(found(joined(documents), 1, -1), documents);
}

TEST_F(TokenFileTest, RefusesAFormatThatDoesNotMatchTheFile) {
  const std::string llmc = put("l.bin", llmc_shard({{1}}, 20240520, 1));
  expect_refused(llmc, source("nanogpt"), {"of the format \"llmc\", but its source has format = \"nanogpt\""});
  expect_refused(llmc, source("text"), {"of the format \"llmc\""});
  const std::string text = put("t.txt", "words");
  for (const std::string format : {"annulus", "megatron", "llmc"}) {
    expect_refused(text, source(format), {"not a file of the format \"" + format + "\""});
  }
  EXPECT_EQ(TokenFile::open(put("t.bin", "words"), source("text"))->tokens(), 5);
  expect_refused(root_ + "/none", source(), {"No such file"});
  expect_refused("/dev/null", source(), {"no regular file"});
}

TEST_F(TokenFileTest, RefusesFilesThatChangeDuringTheRun) {
  const Documents documents = sample(1000);
  const std::string shard = put("s.tokens", annulus_shard(documents, 2, 1000));
  const std::string text = put("t.txt", "some text");
  for (const std::string name : {"/m", "/o"}) put_megatron(root_ + name, documents, 2);
  const std::string llmc = put("l.bin", llmc_shard(documents, 20240520, 1));
  const std::string raw = put("n.bin", raw_tokens(documents, 2));
  const std::vector<std::pair<std::string, std::string>> files{
      {shard, shard}, {text, text}, {root_ + "/m.idx", root_ + "/m.bin"}, {root_ + "/o.bin", root_ + "/o.idx"},
      {llmc, llmc},   {raw, raw}};
  for (const auto& [path, changed] : files) {
    const auto s = source(path == raw ? "nanogpt" : "auto");
    const auto file = TokenFile::open(path, s);
    const Ids before = all_of(*file);
    std::fstream(changed, std::ios::binary | std::ios::in | std::ios::out) << "!";
    expect_refused([&] { all_of(*file); }, {changed + " has changed since the run began", "written to"});
    put_file(changed, "");
    expect_refused([&] { all_of(*file); }, {changed + " has changed since the run began"});
  }
}

TEST_F(TokenFileTest, RefusesAReplacedText) {
  const std::string path = put("t.txt", "some text");
  const auto file = TokenFile::open(path, source());
  put("new", "some text");
  fs::rename(root_ + "/new", path);
  expect_refused([&] { all_of(*file); }, {"was replaced by another file"});
}

TEST_F(TokenFileTest, TokenizationJsonDescribesNanogptShards) {
  const Documents documents{{1, 9, 2}, {1, 8, 2}};
  const std::string raw = raw_tokens(documents, 4);
  put("c/train.bin", raw);
  const auto about = [&](const std::string& tokens, const std::string& sum, const std::string& more = "") {
    put("c/tokenization.json",
        R"({"version":1,"format":"nanogpt","width":32,"tokenizer":{"digest":"abc","name":"t","vocab":10},"begin":1,)"
        R"("end":2,"shards":[{"file":"train.bin","tokens":)" +
            tokens + R"(,"documents":2,"bytes":24,"checksum":")" + sum + "\"" + more + "}]}");
  };
  about("6", checksum(raw.data(), raw.size()));
  const std::string path = root_ + "/c/train.bin";
  const auto file = TokenFile::open(path, source());
  EXPECT_EQ(file->format(), TokenFormat::kNanogpt);
  EXPECT_EQ(file->bits(), 32);
  EXPECT_EQ(file->vocab(), 10);
  EXPECT_EQ(file->tokenizer(), "abc");
  EXPECT_EQ(documents_of(*file), documents);
  file->verify();
  about("6", std::string(32, '0'));
  expect_refused([&] { TokenFile::open(path, source())->verify(); }, {"checksum", "tokenization.json says 000"});
  about("7", "");
  expect_refused(path, source(), {"has 6 tokens", "says 7"});
  // The file of targets that was written with it must be there, and be the same.
  const std::string targets("\0\1\1\0\0\1", 6);
  about("6", checksum(raw.data(), raw.size()),
        R"(,"targets_checksum":")" + checksum(targets.data(), targets.size()) + "\"");
  expect_refused(path, source(), {"train.bin was written with ", "train.bin.targets, which says", "copy both files"});
  put("c/train.bin.targets", targets);
  TokenFile::open(path, source())->verify();
  put("c/train.bin.targets", std::string(6, '\1'));
  expect_refused([&] { TokenFile::open(path, source())->verify(); }, {"train.bin.targets: checksum ", "was damaged"});
  put("c/tokenization.json", "{\"version\":1,");
  expect_refused([&] { TokenFile::open(path, source()); }, {"tokenization.json is damaged"});
  put("c/tokenization.json", "{\"version\":2}");
  expect_refused([&] { TokenFile::open(path, source()); }, {"tokenization.json is damaged", "version 2"});
}

// Files of one folder that several threads open share what its tokenization.json says.
TEST_F(TokenFileTest, ThreadsReadATokenizationJsonOnce) {
  for (const char* const folder : {"a", "b"}) {
    put(folder + std::string("/tokenization.json"),
        R"({"version":1,"format":"nanogpt","width":32,"tokenizer":{"digest":"abc","name":"t","vocab":10},)"
        R"("shards":[{"file":"train.bin","tokens":6,"documents":2,"bytes":24,"checksum":""}]})");
  }
  Tokenizations all;
  std::vector<std::array<std::shared_ptr<const Tokenization>, 3>> found(4);
  std::vector<std::thread> threads;
  for (auto& own : found) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        own = {all.of_folder(root_ + "/a"), all.of_file(root_ + "/b/train.bin"), all.of_file(root_ + "/b/other.bin")};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_NE(found[0][0], nullptr);
  ASSERT_NE(found[0][1], nullptr);
  EXPECT_NE(found[0][0], found[0][1]);
  EXPECT_EQ(found[0][2], nullptr);
  for (const auto& own : found) EXPECT_EQ(own, found[0]);  // the same objects
}

// A sparse shard and a sparse Megatron pair of 1e9 documents each: opening reads only a bounded part of them.
TEST_F(TokenFileTest, OpeningReadsABoundedPart) {
  const int64_t documents = 1000000000;
  std::string header = annulus_shard({}, 2, 10).substr(0, 4096);
  const uint64_t counts[] = {0, static_cast<uint64_t>(documents), 10, 4096,
                             4096 + 8 * static_cast<uint64_t>(documents + 1)};
  std::memcpy(header.data() + 16, counts, sizeof counts);
  const std::string path = put("s.tokens", header);
  fs::resize_file(path, 4096 + 16 * static_cast<uint64_t>(documents) + 8);
  EXPECT_EQ(TokenFile::open(path, source())->documents(), documents);
  fs::remove(path);

  std::string index = megatron_index({}, {}, 2, 8).substr(0, 34);
  const uint64_t sequences[] = {static_cast<uint64_t>(documents), static_cast<uint64_t>(documents) + 1};
  std::memcpy(index.data() + 18, sequences, sizeof sequences);
  put("m.bin", "");
  put("m.idx", index);
  fs::resize_file(root_ + "/m.idx", 34 + 20 * static_cast<uint64_t>(documents) + 8);
  std::fstream end(root_ + "/m.idx", std::ios::binary | std::ios::in | std::ios::out);
  end.seekp(-8, std::ios::end);
  end.write(reinterpret_cast<const char*>(&documents), 8);
  end.close();
  EXPECT_EQ(TokenFile::open(root_ + "/m.idx", source())->documents(), documents);
  fs::remove(root_ + "/m.idx");
}

}  // namespace
}  // namespace annulus::token_file_test
