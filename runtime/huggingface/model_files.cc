// See model_files.h.
#include "runtime/huggingface/model_files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/huggingface/byte_tokenizer.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr size_t kPiece = 1 << 20;
constexpr size_t kDeepestTokenizer = 64;

[[noreturn]] void unreadable(const std::string& path) {
  throw Error(kind_of_errno(errno), "huggingface", path + " cannot be read: " + std::strerror(errno));
}

// Calls `take` with the file's bytes, piece by piece.
template <typename Take>
void read_pieces(const std::string& path, const Take& take) {
  std::ifstream in(path, std::ios::binary);
  std::string piece(kPiece, '\0');
  if (!in) unreadable(path);
  while (in) {
    in.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    if (in.bad()) unreadable(path);
    take(piece.data(), static_cast<size_t>(in.gcount()));
  }
}

// The digest that `annulus tokenize` gives a tokenizer (python/tokenizer/tokenizer.py): the checksum of all its bytes.
std::string digest_of(const std::string& path) {
  Checksum sum;
  read_pieces(path, [&](const char* data, size_t bytes) { sum.update(data, bytes); });
  return sum.hex();
}

// Finds the largest id, in model.vocab (an object of ids, or a list of pieces by id) and in added_tokens.
class Ids : public Json::json_sax_t {
 public:
  int64_t largest() const { return std::max(largest_, pieces_ - 1); }
  const std::string& complaint() const { return complaint_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t value) override {
    const bool added = path_.size() == 3 && path_[0] == "added_tokens" && path_[2] == "id";
    const bool of_vocabulary = path_.size() == 3 && path_[0] == "model" && path_[1] == "vocab" && !path_[2].empty();
    if (added || of_vocabulary) largest_ = std::max(largest_, static_cast<int64_t>(std::min<uint64_t>(value, kMost)));
    return true;
  }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool start_array(size_t) override {
    if (path_.size() == 3 && path_[0] == "model" && path_[1] == "vocab" && path_[2].empty()) ++pieces_;
    return enter();
  }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  // In path_ an empty name stands for a list, so a member with an empty name is "?".
  bool key(string_t& name) override {
    path_.back() = name.empty() ? "?" : name;
    return true;
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    complaint_ = error.what();
    return false;
  }

 private:
  static constexpr uint64_t kMost = uint64_t{1} << 62;
  bool enter() {
    if (path_.size() >= kDeepestTokenizer) {
      complaint_ = "nested too deeply";
      return false;
    }
    path_.emplace_back();
    return true;
  }
  bool leave() {
    path_.pop_back();
    return true;
  }

  std::vector<std::string> path_;  // for each open object the current member, for each open list ""
  int64_t largest_ = -1;
  int64_t pieces_ = 0;  // of a list, in which each piece's id is its index
  std::string complaint_;
};

[[noreturn]] void refuse_files(const std::string& message) { throw Error(ErrorKind::kInput, "huggingface", message); }

}  // namespace

const std::vector<std::string>& passed_files() {
  static const std::vector<std::string> names = {
      "generation_config.json",  "tokenizer.json",     "tokenizer.model", "tokenizer_config.json",
      "special_tokens_map.json", "added_tokens.json",  "vocab.json",      "merges.txt",
      "chat_template.jinja",     "chat_template.json", "tekken.json",     "tokenizer.model.v3"};
  return names;
}

std::vector<std::string> copy_files(const std::vector<std::string>& names, const std::string& from,
                                    const std::string& to, FileSystem& files) {
  std::vector<std::string> copied;
  for (const std::string& name : names) {
    const std::string source = from + "/" + name, path = to + "/" + name;
    if (!is_file(source) || is_file(path)) continue;
    replace_file(files, path, [&](const std::string& beside) {
      auto file = files.create(beside);
      read_pieces(source, [&](const char* data, size_t bytes) { file->write(data, bytes); });
      file->sync();
      file->close();
    });
    copied.push_back(name);
  }
  return copied;
}

int64_t tokenizer_ids(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) unreadable(path);
  Ids ids;
  if (!Json::sax_parse(in, &ids)) refuse_files(path + ": not a tokenizer.json: " + ids.complaint());
  if (ids.largest() < 0) refuse_files(path + ": not a tokenizer.json: it has no ids in \"model\", \"vocab\"");
  return ids.largest() + 1;
}

void copy_tokenizer(const std::string& from, const std::string& to) {
  if (from.empty()) return;
  FileSystem::real().make_folder(to);
  copy_files({"tokens.table", "tokenization.json", "tokenizer.json", "tokenizer.model"}, from, to);
}

std::string check_tokenizer(const std::string& folder, int64_t vocab, bool data_is_text,
                            const std::string& data_tokenizer) {
  std::vector<std::string> there;
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    if (is_file(folder + "/" + name)) there.push_back(folder + "/" + name);
  }
  if (there.empty()) return "it has no tokenizer to compare with the data's";
  if (there[0].ends_with(".json")) {
    const int64_t ids = tokenizer_ids(there[0]);
    if (ids > vocab) {
      refuse_files(there[0] + ": its ids go up to " + std::to_string(ids - 1) +
                   ", but config.json beside it says vocab_size " + std::to_string(vocab) +
                   ": the tokenizer belongs to another model");
    }
  }
  const std::string how = "annulus tokenize --tokenizer " + shell_quote({folder}) + " makes shards of its ids";
  if (data_is_text && is_byte_tokenizer(there[0])) return "its tokenizer's ids are bytes, as the data's tokens are";
  if (data_is_text) {
    refuse_files(there[0] + ": the model has a tokenizer, but data.train is text, whose tokens are bytes: " + how);
  }
  if (data_tokenizer.empty()) return "the data do not say with which tokenizer they were made";
  std::string digests;
  for (const std::string& path : there) {
    const std::string digest = digest_of(path);
    if (digest == data_tokenizer) return "its tokenizer is the data's";
    digests += (digests.empty() ? "" : ", ") + path + " has " + digest;
  }
  refuse_files("data.train was made with the tokenizer of digest " + data_tokenizer + ", but " + digests +
               ": the same id stands for different texts; " + how);
}

}  // namespace annulus
