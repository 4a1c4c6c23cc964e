// Tests of runtime/huggingface/byte_tokenizer.h: the files say that a byte's id is its value, special tokens are those
// of the model beyond the bytes, and only tokenizers of that kind are taken for one. That transformers reads the files
// so, integration_tests/models/byte_tokenizer_test.py tests.
#include "runtime/huggingface/byte_tokenizer.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/runtime/huggingface/folders.h"

namespace annulus::byte_tokenizer_test {
namespace {

using Json = nlohmann::json;

bool is_accepted(const std::string& text) {
  const std::string path = fresh_folder("bytes") + "/tokenizer.json";
  write_text(path, text);
  return is_byte_tokenizer(path);
}

TEST(ByteTokenizer, IdOfAByteIsItsValue) {
  const ByteTokenizer made = byte_tokenizer({}, 256);
  const Json tokenizer = Json::parse(made.tokenizer), config = Json::parse(made.config);
  const Json& vocab = tokenizer["model"]["vocab"];
  EXPECT_EQ(vocab.size(), 256U);
  std::set<int> ids;
  for (const Json& id : vocab) ids.insert(id.get<int>());
  EXPECT_EQ(ids.size(), 256U);
  EXPECT_EQ(*ids.begin(), 0);
  EXPECT_EQ(*ids.rbegin(), 255);
  // Of GPT-2's bytes_to_unicode.
  for (const auto& [character, id] : std::vector<std::pair<std::string, int>>{{"Ā", 0},
                                                                              {"Ċ", 10},
                                                                              {"Ġ", 32},
                                                                              {"!", 33},
                                                                              {"a", 97},
                                                                              {"~", 126},
                                                                              {"ġ", 127},
                                                                              {"ł", 160},
                                                                              {"¡", 161},
                                                                              {"¬", 172},
                                                                              {"Ń", 173},
                                                                              {"®", 174},
                                                                              {"ÿ", 255}}) {
    EXPECT_EQ(vocab.value(character, -1), id) << character;
  }
  EXPECT_EQ(tokenizer["added_tokens"], Json::array());
  EXPECT_EQ(tokenizer["model"]["merges"], Json::array());
  for (const char* token : {"bos_token", "eos_token", "unk_token", "pad_token"}) {
    EXPECT_TRUE(config.at(token).is_null()) << token;
  }
}

TEST(ByteTokenizer, SpecialTokensAreThoseOfTheModelBeyondTheBytes) {
  const auto made = [](const TextIds& ids, int64_t vocab) {
    const ByteTokenizer files = byte_tokenizer(ids, vocab);
    EXPECT_TRUE(is_accepted(files.tokenizer));
    return std::pair(Json::parse(files.tokenizer), Json::parse(files.config));
  };
  const auto [both, names] = made({.begin = 300, .ends = {2, 400, 257}}, 320);
  EXPECT_EQ(both["model"]["vocab"].size(), 258U);
  ASSERT_EQ(both["added_tokens"].size(), 2U);
  for (const Json& added : both["added_tokens"]) {
    EXPECT_TRUE(added["special"].get<bool>());
    EXPECT_EQ(both["model"]["vocab"].value(added["content"].get<std::string>(), -1), added["id"]);
  }
  EXPECT_EQ(both["model"]["vocab"].value(names["bos_token"].get<std::string>(), -1), 300);
  EXPECT_EQ(both["model"]["vocab"].value(names["eos_token"].get<std::string>(), -1), 257)
      << "the first in [256, vocab)";
  const auto [one, name] = made({.begin = 256, .ends = {256}}, 257);
  EXPECT_EQ(one["added_tokens"].size(), 1U);
  EXPECT_EQ(name["bos_token"], name["eos_token"]);
  const auto [none, nothing] = made({.begin = 1, .ends = {2}}, 320);
  EXPECT_EQ(none["added_tokens"].size(), 0U) << "1 and 2 are bytes of texts";
  EXPECT_TRUE(nothing["bos_token"].is_null() && nothing["eos_token"].is_null());
}

TEST(ByteTokenizer, IsRecognizedAgain) {
  const std::string text = byte_tokenizer({}, 256).tokenizer;
  const Json saved = Json::parse(text);
  EXPECT_TRUE(is_accepted(text));
  EXPECT_TRUE(is_accepted(saved.dump())) << "as another program writes it";
  const auto with = [&](const Json& patch) {
    Json changed = saved;
    changed.merge_patch(patch);
    return is_accepted(changed.dump());
  };
  EXPECT_TRUE(with({{"pre_tokenizer", {{"use_regex", true}}}}));
  EXPECT_TRUE(with({{"post_processor", {{"type", "ByteLevel"}, {"trim_offsets", true}}}}));
  for (const Json& patch : std::vector<Json>{
           {{"model", {{"type", "WordPiece"}}}},
           {{"model", {{"vocab", {{"a", 98}}}}}},
           {{"model", {{"vocab", {{"a", nullptr}}}}}},  // which removes it
           {{"model", {{"merges", Json::array({"a b"})}}}},
           {{"model", {{"ignore_merges", true}}}},
           {{"model", {{"end_of_word_suffix", "</w>"}}}},
           {{"model", {{"vocab", 7}}}},
           {{"normalizer", {{"type", "NFC"}}}},
           {{"pre_tokenizer", {{"add_prefix_space", true}}}},
           {{"pre_tokenizer", {{"add_prefix_space", "no"}}}},
           {{"pre_tokenizer", {{"type", "Whitespace"}}}},
           {{"post_processor", {{"type", "TemplateProcessing"}}}},
           {{"decoder", {{"type", "Metaspace"}}}},
           {{"added_tokens", Json::array({{{"id", 256}, {"content", "the"}, {"special", false}}})}},
           {{"added_tokens", Json::array({{{"id", 97}, {"content", "<a>"}, {"special", true}}})}},
       }) {
    EXPECT_FALSE(with(patch)) << patch;
  }
  EXPECT_FALSE(is_accepted("{"));
  EXPECT_FALSE(is_accepted("[]"));
  EXPECT_FALSE(is_accepted(std::string(100000, '[')));
  EXPECT_FALSE(is_accepted(text + std::string(2 << 20, ' '))) << "larger than any such tokenizer";
  EXPECT_FALSE(is_byte_tokenizer(fresh_folder("none") + "/tokenizer.json"));
}

}  // namespace
}  // namespace annulus::byte_tokenizer_test
