// Tests of the weights with which the tokens of a shard count as targets: reading, refusing and identifying them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "common/checksum.h"
#include "common/error.h"
#include "runtime/data/shards/corpus.h"
#include "runtime/data/shards/token_file.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/token_writers.h"

namespace annulus::token_weights_test {
namespace {

namespace fs = std::filesystem;

const std::string kTokenizer(16, '\x5a');

class TokenWeights : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/weights";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }

  std::string put(const std::string& name, const Documents& documents,
                  const std::optional<std::vector<float>>& weights) {
    return put_bytes(name, annulus_shard(documents, 2, 1000, kTokenizer, weights));
  }
  std::string put_bytes(const std::string& name, const std::string& bytes) {
    put_file(root_ + "/" + name, bytes);
    return root_ + "/" + name;
  }
  SourceConfig source(const std::vector<std::string>& names) const {
    SourceConfig s;
    for (const std::string& name : names) s.files.push_back(root_ + "/" + name);
    return s;
  }

  std::string root_;
};

template <typename Of>
std::vector<float> weights_of(const Of& of, int64_t first, int64_t count) {
  std::vector<float> weights;
  int64_t next = first;
  of.visit_weights(first, count, [&](int64_t begin, int64_t n, float weight) {
    EXPECT_EQ(begin, next);
    EXPECT_GT(n, 0);
    next = begin + n;
    weights.insert(weights.end(), static_cast<size_t>(n), weight);
  });
  EXPECT_EQ(next, first + count);
  return weights;
}

// Documents of 4, 0, 1 and 6 tokens; runs cross their boundaries.
const Documents kDocuments = {{1, 2, 3, 4}, {}, {5}, {6, 7, 8, 9, 10, 11}};
const std::vector<float> kWeights = {0, 0, 1, 1, 1, 1, 0, 0.25F, 0, 3, 3};

TEST_F(TokenWeights, EveryRangeIsReadAsWritten) {
  const auto file = TokenFile::open(put("a.tokens", kDocuments, kWeights), {});
  ASSERT_TRUE(file->weights());
  EXPECT_EQ(file->weights()->counted, 7);
  EXPECT_EQ(file->weights()->least, 0.25F);
  EXPECT_EQ(file->weights()->most, 3);
  for (int64_t first = 0; first <= 11; ++first) {
    for (int64_t count = 0; first + count <= 11; ++count) {
      EXPECT_EQ(weights_of(*file, first, count),
                std::vector<float>(kWeights.begin() + first, kWeights.begin() + first + count));
    }
  }
  file->verify();
  Ids ids(11);
  file->read(0, 11, ids.data());
  EXPECT_EQ(ids, joined(kDocuments)) << "tokens and documents are those of a shard without weights";
  EXPECT_EQ(file->documents(), 4);
  const auto none = TokenFile::open(put("e.tokens", {}, std::vector<float>{}), {});
  none->verify();
  EXPECT_EQ(none->weights()->counted, 0);
  const auto nothing = TokenFile::open(put("n.tokens", kDocuments, std::vector<float>(11, 0)), {});
  nothing->verify();
  EXPECT_EQ(nothing->weights()->most, 0);
  const auto silent = TokenFile::open(put("s.tokens", kDocuments, std::nullopt), {});
  EXPECT_FALSE(silent->weights());
  EXPECT_EQ(weights_of(*silent, 3, 5), std::vector<float>(5, 1));
}

// Formats without weights of their own have a byte for each token beside them.
TEST_F(TokenWeights, AFileBesideTokensMarksTargets) {
  std::string bytes;
  std::vector<float> marks;
  for (const float weight : kWeights) {
    marks.push_back(weight > 0 ? 1 : 0);
    bytes.push_back(weight > 0 ? 1 : 0);
  }
  put_megatron(root_ + "/pair", kDocuments, 2);
  put_bytes("llmc.bin", llmc_shard(kDocuments, 20240520, 1));
  put_bytes("raw.bin", raw_tokens(kDocuments, 2));
  for (const std::string name : {"pair", "llmc", "raw"}) {
    const std::string path = root_ + "/" + name + ".bin";
    SourceConfig nano;
    if (name == "raw") nano.format = "nanogpt";
    const auto fingerprint = [&] {
      Checksum sum;
      TokenFile::open(path, nano)->add_fingerprint(sum);
      return sum.hex();
    };
    EXPECT_FALSE(TokenFile::open(path, nano)->weights()) << name;
    const std::string without = fingerprint();
    put_bytes(name + ".bin.targets", bytes);
    const auto file = TokenFile::open(path, nano);
    ASSERT_TRUE(file->weights()) << name;
    EXPECT_EQ(file->weights()->least, 1);
    EXPECT_EQ(file->weights()->most, 1);
    for (int64_t first = 0; first <= 11; ++first) {
      for (int64_t count = 0; first + count <= 11; ++count) {
        EXPECT_EQ(weights_of(*file, first, count),
                  std::vector<float>(marks.begin() + first, marks.begin() + first + count));
      }
    }
    file->verify();
    EXPECT_NE(fingerprint(), without) << name;
    SourceConfig all = source({name + ".bin*"});
    all.format = nano.format;
    EXPECT_EQ(Corpus(all, 1000).counted(0, 11), std::count(marks.begin(), marks.end(), 1))
        << "a glob finds no tokens there";
    put_bytes(name + ".bin.targets", bytes + "\1");
    expect_error(ErrorKind::kInput, {name + ".bin.targets has 12 bytes", "each of the 11 tokens", "make both together"},
                 [&] { TokenFile::open(path, nano); });
    put_bytes(name + ".bin.targets", std::string(bytes).replace(7, 1, "\2"));
    expect_error(ErrorKind::kInput, {name + ".bin.targets: byte 7 is 2", "1 is expected for a token that counts"},
                 [&] { TokenFile::open(path, nano)->verify(); });
  }
}

TEST_F(TokenWeights, FilesThatSayNothingCountWhole) {
  put("a.tokens", kDocuments, kWeights);
  put("b.tokens", {{}}, std::nullopt);
  put("c.tokens", {{12, 13}}, std::nullopt);
  put("d.tokens", {{14, 15}}, std::vector<float>{0, 1});
  const Corpus corpus(source({"*.tokens"}));
  std::vector<float> all = kWeights;
  all.insert(all.end(), {1, 1, 0, 1});
  for (int64_t first = 0; first <= 15; ++first) {
    for (int64_t count = 0; first + count <= 15; ++count) {
      const std::vector<float> part(all.begin() + first, all.begin() + first + count);
      EXPECT_EQ(weights_of(corpus, first, count), part);
      EXPECT_EQ(corpus.counted(first, count), count - std::count(part.begin(), part.end(), 0.0F));
    }
  }
  EXPECT_TRUE(corpus.marks_targets());
  EXPECT_TRUE(corpus.weighs_targets());
  EXPECT_TRUE(Corpus(source({"d.tokens"})).marks_targets());
  EXPECT_FALSE(Corpus(source({"d.tokens"})).weighs_targets()) << "a mask needs no weights";
  EXPECT_FALSE(Corpus(source({"c.tokens"})).marks_targets());
}

// A corpus with another mask is another corpus: its rows are made anew, and a run does not resume with it unnoticed.
TEST_F(TokenWeights, FingerprintDependsOnTheWeights) {
  // The weights that differ lie in the middle of the file.
  std::vector<float> weights(40000, 1);
  for (size_t i = 0; i < weights.size(); i += 2) weights[i] = 0;
  const Documents documents = {Ids(40000, 7)};
  put("a.tokens", documents, weights);
  weights[20000] = 1;
  weights[20001] = 0;
  put("b.tokens", documents, weights);
  put("c.tokens", documents, std::nullopt);
  const std::string first = Corpus(source({"a.tokens"})).fingerprint();
  EXPECT_NE(first, Corpus(source({"b.tokens"})).fingerprint());
  EXPECT_NE(first, Corpus(source({"c.tokens"})).fingerprint());
}

TEST_F(TokenWeights, RefusesWhatIsNoWeight) {
  const std::string good = annulus_shard(kDocuments, 2, 1000, kTokenizer, kWeights);
  uint64_t ends = 0, runs = 0;
  std::memcpy(&ends, good.data() + 96, 8);
  std::memcpy(&runs, good.data() + 104, 8);
  ASSERT_EQ(runs, 6U);
  // With the checksum of what is changed, as if it had been written so.
  const auto with = [&](size_t at, auto value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, sizeof value);
    const std::string sum = checksum(bytes.data() + 4096, bytes.size() - 4096);
    for (size_t i = 0; i < 16; ++i) bytes[72 + i] = static_cast<char>(std::stoi(sum.substr(2 * i, 2), nullptr, 16));
    return put_bytes("s.tokens", bytes);
  };
  const auto refused = [&](const std::string& path, const std::vector<std::string>& words) {
    std::vector<std::string> all = {"s.tokens was cut off or damaged"};
    all.insert(all.end(), words.begin(), words.end());
    expect_error(ErrorKind::kInput, all, [&] {
      const auto file = TokenFile::open(path, {});
      weights_of(*file, 0, 11);
      file->verify();
    });
  };
  for (const uint64_t value : {uint64_t{0}, uint64_t{5}, uint64_t{7}, uint64_t{1} << 61, ~uint64_t{0}}) {
    refused(with(104, value), {"does not fit its"});
  }
  refused(with(96, ends + 8), {"does not fit its"});
  refused(put_bytes("s.tokens", good.substr(0, good.size() - 8)), {"does not fit its"});
  refused(with(112, uint64_t{12}), {"weights do not fit its 11 tokens"});
  refused(with(112, uint64_t{6}), {"7 tokens of it count as targets, but its header says 6"});
  refused(with(120, 0.5F), {"or other weights"});
  refused(with(124, std::numeric_limits<float>::infinity()), {"weights do not fit its 11 tokens"});
  refused(with(ends + 5 * 8, uint64_t{10}), {"weights do not fit its 11 tokens"});
  for (const uint64_t end : {uint64_t{2}, uint64_t{12}, ~uint64_t{0}}) {
    refused(with(ends + 8, end), {"run 1 of its weights ends where it may not"});
  }
  const size_t weights = ends + runs * 8;
  for (const float weight : {-1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refused(with(weights + 4, weight), {"the weight of run 1 is not a number from 0 on"});
  }
  refused(with(weights + 4, 0.0F), {"the weight at token 2 is the one before it, in two runs"});
}

}  // namespace
}  // namespace annulus::token_weights_test
