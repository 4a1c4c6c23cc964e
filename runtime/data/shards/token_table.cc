// See token_table.h.
#include "runtime/data/shards/token_table.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "common/checksum.h"
#include "common/error.h"
#include "common/mapped_file.h"
#include "common/text.h"

namespace annulus {
namespace {

struct TableHeader {
  char magic[8];
  uint32_t version, rule;
  uint64_t ids, text_bytes;
  unsigned char tokenizer[16], checksum[16];
};
static_assert(sizeof(TableHeader) == 64);

constexpr int64_t kLongestTable = int64_t{1} << 30;

}  // namespace

TokenTable TokenTable::load(const std::string& path) {
  const auto refuse = [&](const std::string& what) {
    throw Error(
        ErrorKind::kInput, "data",
        path + " is not a valid table of tokens: " + what + "; run `annulus tokenize` again, or copy the file again");
  };
  const MappedFile file("data", path);
  if (file.size() < static_cast<int64_t>(sizeof(TableHeader)) || file.size() > kLongestTable) {
    refuse("it has " + with_commas(file.size(), "byte"));
  }
  const auto header = file.at<TableHeader>(0);
  if (std::memcmp(header.magic, "ANNTABLE", 8) != 0) refuse("it does not begin with ANNTABLE");
  if (header.version != 1) refuse("it has version " + std::to_string(header.version) + ", but only version 1 is read");
  const auto body = static_cast<uint64_t>(file.size()) - sizeof(TableHeader);
  // No sum overflows: counts are below the file's size.
  if (header.ids > body / 9 || header.text_bytes > body ||
      (header.ids + 1) * 8 + header.ids + header.text_bytes != body) {
    refuse("its header says that it has " + std::to_string(header.ids) + " ids and " +
           counted(header.text_bytes, "byte") + " of text, which does not fit its " + with_commas(file.size(), "byte"));
  }
  std::string content(body, '\0');
  file.copy(sizeof(TableHeader), static_cast<int64_t>(body), content.data());
  file.require_unchanged();
  if (const std::string sum = checksum(content.data(), content.size()); sum != hex_text(header.checksum)) {
    refuse("its checksum is " + sum + ", but its header says " + hex_text(header.checksum));
  }

  TokenTable table;
  table.path_ = path;
  table.tokenizer_ = hex_text(header.tokenizer);
  if (header.rule > static_cast<uint32_t>(Rule::kStripUntilText)) {
    refuse("its rule for spaces is " + std::to_string(header.rule));
  }
  table.rule_ = static_cast<Rule>(header.rule);
  table.offsets_.resize(header.ids + 1);
  std::memcpy(table.offsets_.data(), content.data(), (header.ids + 1) * 8);
  if (table.offsets_.front() != 0 || table.offsets_.back() != header.text_bytes ||
      !std::is_sorted(table.offsets_.begin(), table.offsets_.end())) {
    refuse("the places of its texts are not in order");
  }
  const char* const kinds = content.data() + (header.ids + 1) * 8;
  for (uint64_t id = 0; id < header.ids; ++id) {
    const auto kind = static_cast<uint8_t>(kinds[id]);
    if (kind > static_cast<uint8_t>(Kind::kUnstripped)) {
      refuse("id " + std::to_string(id) + " is of kind " + std::to_string(kind));
    }
    table.kinds_.push_back(static_cast<Kind>(kind));
  }
  table.text_.assign(kinds + header.ids, header.text_bytes);
  return table;
}

std::string_view TokenTable::bytes(int64_t id) const {
  if (id < 0 || id >= size()) {
    throw Error(ErrorKind::kInput, "data",
                "id " + std::to_string(id) + " is not in " + path_ + ", which has " + with_commas(size(), "id") +
                    ": the tokens belong to another tokenizer");
  }
  const auto i = static_cast<size_t>(id);
  return std::string_view(text_).substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
}

bool TokenTable::hidden(int64_t id) const {
  bytes(id);
  const Kind kind = kinds_[static_cast<size_t>(id)];
  return kind == Kind::kSpecial || kind == Kind::kUnused;
}

// python/tokenizer/table.py does the same when it compares the table with the library.
void TokenText::append(int64_t id, std::string& out) {
  using Rule = TokenTable::Rule;
  if (table_.hidden(id)) return;
  const Rule rule = table_.rule_;
  const bool whole = table_.kinds_[static_cast<size_t>(id)] == TokenTable::Kind::kUnstripped;
  const bool strip = (rule == Rule::kStripOne && first_) || (rule == Rule::kStripUntilText && empty_);
  std::string_view text = table_.bytes(id);
  const size_t before = out.size();
  if (!whole && rule == Rule::kStripFirstToken && first_) {
    std::copy_if(text.begin(), text.end(), std::back_inserter(out), [](char c) { return c != ' '; });
  } else {
    out += text.substr(!whole && strip && text.starts_with(' ') ? 1 : 0);
  }
  first_ = first_ && text.empty() && rule != Rule::kStripFirstToken;
  empty_ = empty_ && out.size() == before;
}

}  // namespace annulus
