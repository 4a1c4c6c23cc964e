// Tests of runtime/data/shards/token_table.h on tables written by hand; tests/python/tokenizer/table_test.py compares
// real ones with the tokenizers' own libraries.
#include "runtime/data/shards/token_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "common/checksum.h"
#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/token_writers.h"

namespace annulus::token_table_test {
namespace {

struct Entry {
  std::string text;
  uint8_t kind = 0;  // 0 ordinary, 1 special, 2 unused, 3 keeps its spaces
};

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string table_of(uint32_t rule, const std::vector<Entry>& entries, uint32_t version = 1) {
  std::string body, texts, kinds;
  put_value(body, uint64_t{0});
  for (const Entry& entry : entries) {
    texts += entry.text;
    kinds += static_cast<char>(entry.kind);
    put_value(body, uint64_t{texts.size()});
  }
  body += kinds + texts;
  std::string file = "ANNTABLE";
  put_value(file, version);
  put_value(file, rule);
  put_value(file, uint64_t{entries.size()});
  put_value(file, uint64_t{texts.size()});
  return file + std::string(16, '\x5a') + from_hex(checksum(body.data(), body.size())) + body;
}

class TokenTableTest : public ::testing::Test {
 protected:
  TokenTable load(const std::string& bytes) {
    put_file(path_, bytes);
    return TokenTable::load(path_);
  }
  std::string text(uint32_t rule, const std::vector<Entry>& entries, const Ids& ids) {
    const TokenTable table = load(table_of(rule, entries));
    TokenText decoder(table);
    std::string out = "> ";  // text that is already in the output does not count as the beginning
    for (const int64_t id : ids) decoder.append(id, out);
    return out.substr(2);
  }
  void expect_refused(const std::string& bytes, const std::string& words) {
    expect_error(ErrorKind::kInput, {path_, words}, [&] { load(bytes); });
  }
  // `bytes` with `content` written at offset `at` behind the header, and the checksum recomputed.
  std::string with(std::string bytes, size_t at, const std::string& content) {
    bytes.replace(at, content.size(), content);
    return bytes.replace(48, 16, from_hex(checksum(bytes.data() + 64, bytes.size() - 64)));
  }

  const std::string path_ = ::testing::TempDir() + "/token_table/tokens.table";
  const std::vector<Entry> entries_ = {{"<s>", 1}, {" a"}, {"b"}, {" "}, {"", 2}, {" c", 3}, {"\xff"}, {"  d"}};
};

TEST_F(TokenTableTest, ReadsItsEntries) {
  const TokenTable table = load(table_of(1, entries_));
  EXPECT_EQ(table.size(), 8);
  EXPECT_EQ(table.tokenizer(), "5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a");
  EXPECT_EQ(table.bytes(0), "<s>");
  EXPECT_EQ(table.bytes(6), "\xff");
  EXPECT_TRUE(table.hidden(0));
  EXPECT_TRUE(table.hidden(4));
  EXPECT_FALSE(table.hidden(5));
  for (const int64_t id : {int64_t{-1}, int64_t{8}}) EXPECT_THROW(table.bytes(id), Error);
}

TEST_F(TokenTableTest, SpaceRulesApplyAtTheBeginning) {
  // The texts by rule: 0 keeps all spaces, 1 drops one, 2 drops those of the first token, and 3 drops one of each token
  // until there is text.
  const auto all = [&](const Ids& ids) {
    std::vector<std::string> texts;
    for (uint32_t rule = 0; rule < 4; ++rule) texts.push_back(text(rule, entries_, ids));
    return texts;
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(all({1, 1}), (Texts{" a a", "a a", "a a", "a a"}));
  EXPECT_EQ(all({0, 4, 1, 0, 2}), (Texts{" ab", "ab", "ab", "ab"}));
  EXPECT_EQ(all({2, 1}), (Texts{"b a", "b a", "b a", "b a"}));
  EXPECT_EQ(all({3, 1}), (Texts{"  a", " a", " a", "a"}));
  EXPECT_EQ(all({7, 7}), (Texts{"  d  d", " d  d", "d  d", " d  d"}));
  EXPECT_EQ(all({5, 1}), (Texts{" c a", " c a", " c a", " c a"}));
  EXPECT_EQ(all({6, 6}), Texts(4, "\xff\xff"));
}

TEST_F(TokenTableTest, RefusesInvalidTables) {
  const std::string good = table_of(1, entries_);
  const size_t offsets = 64, kinds = 64 + 9 * 8;
  expect_refused("", "it has 0 bytes");
  expect_refused("ANNTOKEN" + good.substr(8), "it does not begin with ANNTABLE");
  expect_refused(table_of(1, entries_, 2), "it has version 2, but only version 1 is read");
  expect_refused(table_of(4, entries_), "its rule for spaces is 4");
  for (size_t n = 64; n < good.size(); ++n) expect_refused(good.substr(0, n), "does not fit its");
  expect_refused(good + "x", "does not fit its");
  std::string huge = good;
  huge.replace(16, 8, std::string(8, '\xff'));
  expect_refused(huge, "does not fit its");
  std::string changed = good;
  changed.back() ^= 1;
  expect_refused(changed, "its checksum is");
  expect_refused(with(good, offsets, "\1"), "not in order");
  expect_refused(with(good, offsets + 16, "\x7f"), "not in order");
  expect_refused(with(good, offsets + 8 * 8, "\1"), "not in order");
  expect_refused(with(good, kinds + 2, "\4"), "id 2 is of kind 4");
  std::filesystem::remove(path_);
  EXPECT_THROW(TokenTable::load(path_), Error);
}

}  // namespace
}  // namespace annulus::token_table_test
