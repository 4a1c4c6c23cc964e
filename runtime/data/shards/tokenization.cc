// See tokenization.h.
#include "runtime/data/shards/tokenization.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr std::string_view kFile = "tokenization.json";
constexpr uintmax_t kLongest = uintmax_t{256} << 20;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw Error(ErrorKind::kInput, "data", path + " " + what + "; run `annulus tokenize` again, or remove the file");
}

int64_t count(const Json& from, const char* key) {
  const auto at = from.find(key);
  if (at == from.end() || !at->is_number_integer() || at->get<int64_t>() < 0) {
    throw JsonRefused(std::string("has no count \"") + key + "\"");
  }
  return at->get<int64_t>();
}

std::string word(const Json& from, const char* key) {
  const auto at = from.find(key);
  if (at == from.end() || !at->is_string()) throw JsonRefused(std::string("has no text \"") + key + "\"");
  return at->get<std::string>();
}

std::optional<int64_t> id(const Json& from, const char* key) {
  const auto at = from.find(key);
  if (at == from.end() || at->is_null()) return std::nullopt;
  return count(from, key);
}

Tokenization parse(const std::string& path, const std::string& text) {
  const Json json = parse_bounded_json(text, 16);
  if (!json.is_object()) throw JsonRefused("holds no object");
  if (count(json, "version") != 1)
    throw JsonRefused("is of version " + json["version"].dump() + ", but 1 was expected");
  Tokenization made;
  made.path = path;
  made.format = word(json, "format");
  const int64_t width = count(json, "width");
  if (width != 16 && width != 32) throw JsonRefused("says that tokens have " + counted(width, "bit"));
  made.width = static_cast<int>(width);
  made.begin = id(json, "begin");
  made.end = id(json, "end");
  const auto tokenizer = json.find("tokenizer");
  if (tokenizer == json.end() || !tokenizer->is_object()) throw JsonRefused("has no object \"tokenizer\"");
  made.tokenizer = word(*tokenizer, "digest");
  made.name = word(*tokenizer, "name");
  made.vocab = count(*tokenizer, "vocab");
  const auto shards = json.find("shards");
  if (shards == json.end() || !shards->is_array()) throw JsonRefused("has no list \"shards\"");
  for (const Json& shard : *shards) {
    if (!shard.is_object()) throw JsonRefused("has a shard that is not an object");
    made.shards[word(shard, "file")] = {count(shard, "tokens"), count(shard, "documents"), count(shard, "bytes"),
                                        word(shard, "checksum"),
                                        shard.contains("targets_checksum") ? word(shard, "targets_checksum") : ""};
  }
  return made;
}

std::shared_ptr<const Tokenization> read(const std::string& path) {
  if (!is_file(path)) return nullptr;
  try {
    return std::make_shared<const Tokenization>(parse(path, read_small_file("data", path, kLongest)));
  } catch (const JsonRefused& refused) {
    refuse(path, "is damaged: it " + std::string(refused.what()));
  }
}

}  // namespace

std::shared_ptr<const Tokenization> Tokenizations::of_folder(const std::string& folder) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = folders_.find(folder);
  if (known != folders_.end()) return known->second;
  return folders_[folder] = read(folder + "/" + std::string(kFile));
}

std::shared_ptr<const Tokenization> Tokenizations::of_file(const std::string& path) {
  auto made = of_folder(folder_of(path));
  return made && made->shards.count(fs::path(path).filename().string()) ? made : nullptr;
}

}  // namespace annulus
