// See byte_tokenizer.h.
#include "runtime/huggingface/byte_tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

using ByteJson = nlohmann::ordered_json;

constexpr int64_t kBytes = 256;

// The character that stands for each byte in a byte-level vocabulary, in UTF-8. As in GPT-2, printable characters of
// Latin-1 stand for themselves, and the other bytes, in their order, have the characters from U+0100 on.
std::array<std::string, kBytes> byte_characters() {
  std::array<std::string, kBytes> characters;
  int code = 0x100;
  for (int byte = 0; byte < kBytes; ++byte) {
    const bool plain = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    const int c = plain ? byte : code++;
    std::string& text = characters[static_cast<size_t>(byte)];
    if (c >= 0x80) text += static_cast<char>(0xc0 | c >> 6);
    text += static_cast<char>(c >= 0x80 ? 0x80 | (c & 0x3f) : c);
  }
  return characters;
}

ByteJson byte_level() {
  // Without the regular expression, a text is one piece. It would change no id, as there is nothing to merge.
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
}

bool is_null(const nlohmann::json& object, const char* key) { return !object.contains(key) || object[key].is_null(); }

bool is_of_type(const nlohmann::json& object, const char* key, std::string_view type) {
  return object.contains(key) && object[key].is_object() && object[key].value("type", "") == type;
}

bool gives_bytes(const nlohmann::json& tokenizer) {
  if (!tokenizer.is_object() || !is_of_type(tokenizer, "model", "BPE")) return false;
  if (!is_of_type(tokenizer, "pre_tokenizer", "ByteLevel") || !is_of_type(tokenizer, "decoder", "ByteLevel"))
    return false;
  if (tokenizer["pre_tokenizer"].value("add_prefix_space", true) || !is_null(tokenizer, "normalizer")) return false;
  // A byte-level post-processor changes no id.
  if (!is_null(tokenizer, "post_processor") && !is_of_type(tokenizer, "post_processor", "ByteLevel")) return false;
  const nlohmann::json& model = tokenizer["model"];
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!is_null(model, affix) && model[affix] != "") return false;
  }
  // Without merges, entries of the vocabulary other than bytes are reached only by ignore_merges.
  if (model.value("ignore_merges", false) || !model.contains("merges") || !model["merges"].empty()) return false;
  if (!model.contains("vocab") || !model["vocab"].is_object()) return false;
  int64_t byte = 0;
  for (const std::string& character : byte_characters()) {
    if (!model["vocab"].contains(character) || model["vocab"][character] != byte++) return false;
  }
  if (is_null(tokenizer, "added_tokens")) return true;
  return std::all_of(
      tokenizer["added_tokens"].begin(), tokenizer["added_tokens"].end(), [](const nlohmann::json& added) {
        return added.is_object() && added.value("special", false) && added.value("id", int64_t{0}) >= kBytes;
      });
}

}  // namespace

ByteTokenizer byte_tokenizer(const TextIds& ids, int64_t vocab) {
  const auto is_free = [&](int64_t id) { return id >= kBytes && id < vocab; };
  const auto first_end = std::find_if(ids.ends.begin(), ids.ends.end(), is_free);
  constexpr int64_t kNone = -1;
  const int64_t end = first_end == ids.ends.end() ? kNone : *first_end;
  const int64_t given_begin = ids.begin.value_or(kNone), begin = is_free(given_begin) ? given_begin : kNone;
  // transformers' class of a family has special tokens of its own where nothing, not even null, is said.
  ByteJson config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                     {"clean_up_tokenization_spaces", false},
                     {"bos_token", nullptr},
                     {"eos_token", nullptr},
                     {"unk_token", nullptr},
                     {"pad_token", nullptr}};
  ByteJson entries = ByteJson::object(), added = ByteJson::array();
  int64_t byte = 0;
  for (const std::string& character : byte_characters()) entries[character] = byte++;
  const auto add = [&](int64_t id, const char* name) {
    entries[name] = id;
    added.push_back({{"id", id},
                     {"content", name},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  };
  if (begin != kNone && begin != end) {
    add(begin, "<|begin|>");
    config["bos_token"] = "<|begin|>";
  }
  if (end != kNone) {
    add(end, "<|end|>");
    config["eos_token"] = "<|end|>";
    if (begin == end) config["bos_token"] = "<|end|>";
  }
  const ByteJson tokenizer = {{"version", "1.0"},
                              {"truncation", nullptr},
                              {"padding", nullptr},
                              {"added_tokens", added},
                              {"normalizer", nullptr},
                              {"pre_tokenizer", byte_level()},
                              {"post_processor", nullptr},
                              {"decoder", byte_level()},
                              {"model",
                               {{"type", "BPE"},
                                {"dropout", nullptr},
                                {"unk_token", nullptr},
                                {"continuing_subword_prefix", nullptr},
                                {"end_of_word_suffix", nullptr},
                                {"fuse_unk", false},
                                {"byte_fallback", false},
                                {"ignore_merges", false},
                                {"vocab", entries},
                                {"merges", ByteJson::array()}}}};
  return {tokenizer.dump(2) + "\n", config.dump(2) + "\n"};
}

bool is_byte_tokenizer(const std::string& path) {
  constexpr size_t kDeepest = 64, kLargest = 1 << 20;  // far more than 256 entries need
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error || size > kLargest) return false;
  try {
    return gives_bytes(parse_bounded_json(read_small_file("huggingface", path), kDeepest));
  } catch (const JsonRefused&) {
    return false;
  } catch (const nlohmann::json::exception&) {  // a member of another type than expected
    return false;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace annulus
