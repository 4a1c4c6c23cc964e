// See sample_prompt.h.
#include "runtime/data/sample_prompt.h"

#include <algorithm>
#include <vector>

#include "common/error.h"
#include "common/utf8.h"
#include "runtime/data/shards/token_table.h"

namespace annulus {
namespace {

constexpr size_t kMostBytes = 32;
constexpr int64_t kTokensRead = 128;

// Whether the byte is a printable character of ASCII, or part of one beyond it.
bool in_words(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x20 && byte != 0x7f;
}

bool is_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const size_t size = utf8_character(text, i);
    if (size == 0) return false;
    i += size;
  }
  return true;
}

}  // namespace

std::string first_words(const std::string& text) {
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    while (end < text.size() && in_words(text[end])) ++end;
    std::string line = text.substr(begin, end - begin);
    bool cut = end == text.size();
    begin = end + 1;
    line.erase(0, std::min(line.find_first_not_of(' '), line.size()));
    if (line.size() > kMostBytes) {
      line.resize(kMostBytes + 1);  // a blank there ends the last word
      cut = true;
    }
    if (cut) line.resize(line.find_last_of(' ') == std::string::npos ? 0 : line.find_last_of(' '));
    line.resize(line.find_last_not_of(' ') + 1);
    // The command line would take a word that begins with a hyphen for an option.
    if (!line.empty() && line.front() != '-' && is_utf8(line)) return line;
  }
  return "";
}

std::string sample_prompt(const Dataset& data, int64_t step, const std::string& table) try {
  const TokenTable tokens = TokenTable::load(table);
  const DrawnRow row =
      data.has_validation() && data.validation_rows(0, step) > 0 ? data.held_out(0, step, 0, 1) : data.drawn(step, 0);
  int64_t begin = 0;
  for (const Piece& piece : row.pieces) {  // one document after the other; padding would follow
    const int64_t count = std::min(kTokensRead, piece.count);
    std::vector<int64_t> ids(static_cast<size_t>(count)), targets(ids.size());
    data.read(row, {{.begin = begin, .count = count}}, ids.data(), targets.data());
    std::string text;
    TokenText decoded(tokens);
    for (const int64_t id : ids) decoded.append(id, text);
    if (const std::string words = first_words(text); !words.empty()) return words;
    begin += piece.count;
  }
  return "";
} catch (const Error&) {
  return "";
}

}  // namespace annulus
