// See inspect_tokens.h.
#include "launcher/tokens/inspect_tokens.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/terminal.h"
#include "common/text.h"
#include "common/utf8.h"
#include "runtime/data/shards/token_file.h"
#include "runtime/data/shards/token_table.h"
#include "runtime/data/shards/tokenization.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kInput, "tokenize", message); }

struct Shards {
  std::string folder;
  std::shared_ptr<const Tokenization> made;  // null where there is no tokenization.json
  std::vector<std::string> paths;
};

// The shards in a folder: those that its tokenization.json lists, or without one the files that end in .tokens or .bin.
Shards find_shards(const std::string& path, Tokenizations& known) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {folder_of(path), known.of_file(path), {path}};
  Shards found{path, known.of_folder(path), {}};
  if (found.made) {
    for (const auto& [name, shard] : found.made->shards) found.paths.push_back(path + "/" + name);
    return found;
  }
  if (fs::exists(path + "/.tokenizing.json", error)) {
    refuse(path + " is not finished: repeat the command that makes it, which continues it");
  }
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const fs::path name = entry.path().filename();
    if (name.extension() == ".tokens" || name.extension() == ".bin") names.insert(entry.path().string());
  }
  if (names.empty()) refuse(path + " holds no shards: there is no tokenization.json and no .tokens or .bin file in it");
  found.paths.assign(names.begin(), names.end());
  return found;
}

// The text on one line, with control characters and invalid bytes escaped as in C.
std::string printable(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t size = utf8_character(text, at);
    const char c = text[at];
    if (c == '\n' || c == '\t') {
      out += c == '\n' ? "\\n" : "\\t";
    } else if (size == 0 || (size == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f))) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(c));
      out += escape;
    } else {
      out += text.substr(at, size);
    }
    at += std::max<size_t>(size, 1);
  }
  return out;
}

class Report {
 public:
  void add(const TokenFile& file) {
    tokens_ += file.tokens();
    if (const auto& weights = file.weights()) {
      marks_ = true;
      int64_t counted = weights->counted.value_or(0);
      if (!weights->counted) {
        file.visit_weights(0, file.tokens(), [&](int64_t, int64_t n, float weight) { counted += weight > 0 ? n : 0; });
      }
      if (counted > 0) {
        least_ = counted_ == 0 ? weights->least : std::min(least_, weights->least);
        most_ = std::max(most_, weights->most);
      }
      counted_ += counted;
    } else {
      least_ = counted_ == 0 ? 1 : std::min(least_, 1.0F);
      most_ = std::max(most_, 1.0F);
      counted_ += file.tokens();
    }
    file.visit_documents(false, [&](int64_t, int64_t length, uint64_t) {
      ++documents_;
      longest_ = std::max(longest_, length);
      ++classes_[std::bit_width(static_cast<uint64_t>(length))];
    });
  }

  int64_t tokens() const { return tokens_; }
  int64_t documents() const { return documents_; }
  // "1,234 tokens (12.3 %), with weights from 0.5 to 2"
  std::string targets_text() const {
    if (!marks_) return "every token counts";
    const double share = tokens_ > 0 ? 100.0 * static_cast<double>(counted_) / static_cast<double>(tokens_) : 0.0;
    std::string text =
        with_commas(counted_, "token") + (counted_ == 1 ? " counts (" : " count (") + rounded(share, 1) + " %)";
    if (counted_ > 0 && (least_ != 1 || most_ != 1)) {
      text += least_ == most_ ? ", each with the weight " + significant(least_, 6)
                              : ", with weights from " + significant(least_, 6) + " to " + significant(most_, 6);
    }
    return text;
  }

  void print_histogram() const {
    if (documents_ == 0) return;
    std::printf("\n  %23s  %13s\n", "tokens of a document", "documents");
    int64_t most = 0;
    for (const auto& [width, count] : classes_) most = std::max(most, count);
    const int room = std::max(10, std::min(60, terminal_columns(STDOUT_FILENO) - 42));
    for (int width = classes_.begin()->first; width <= classes_.rbegin()->first; ++width) {
      const auto at = classes_.find(width);
      const int64_t count = at == classes_.end() ? 0 : at->second;
      const int64_t low = width == 0 ? 0 : int64_t{1} << (width - 1), high = width == 0 ? 0 : (int64_t{1} << width) - 1;
      const std::string range = low == high ? with_commas(low) : with_commas(low) + " - " + with_commas(high);
      // Rounded up, so that even a small count shows.
      const auto length = static_cast<int>((static_cast<__int128>(count) * room + most - 1) / most);
      std::printf("  %23s  %13s  %s\n", range.c_str(), with_commas(count).c_str(), std::string(length, '#').c_str());
    }
    std::printf("  on average %s, at most %s\n", with_commas((tokens_ + documents_ / 2) / documents_).c_str(),
                with_commas(longest_).c_str());
  }

 private:
  int64_t tokens_ = 0, documents_ = 0, longest_ = 0;
  bool marks_ = false;  // whether a shard says which tokens count as targets
  int64_t counted_ = 0;
  float least_ = 0, most_ = 0;      // weights of those that count
  std::map<int, int64_t> classes_;  // by the number of bits of a length: 0, 1, 2 to 3, 4 to 7, ...
};

std::optional<TokenTable> table_beside(const std::string& folder, const std::string& tokenizer) {
  const std::string path = folder + "/tokens.table";
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  TokenTable table = TokenTable::load(path);
  if (!tokenizer.empty() && table.tokenizer() != tokenizer) {
    refuse(path + " is the table of another tokenizer (" + table.tokenizer() + ") than the shards' (" + tokenizer +
           "): use the one that was written with them");
  }
  return table;
}

void print_beginning(const TokenFile& file, const std::optional<TokenTable>& table) {
  constexpr int64_t kShown = 64;
  std::vector<int64_t> ids(std::min(kShown, file.tokens()));
  file.read(0, static_cast<int64_t>(ids.size()), ids.data());
  const auto some = std::span<const int64_t>(ids).first(std::min<size_t>(ids.size(), 16));
  std::printf("\n  the first tokens\n    %s\n", list_text(some).c_str());
  std::string text;
  if (file.format() == TokenFormat::kText) {
    text.assign(ids.begin(), ids.end());
  } else if (table) {
    for (const int64_t id : ids) text += table->bytes(id);  // special tokens appear by name
  } else {
    return;
  }
  std::printf("    \"%s\"\n", printable(text).c_str());
}

void line(const char* name, const std::string& value) { std::printf("  %-12s %s\n", name, value.c_str()); }

}  // namespace

void inspect_tokens(const std::string& path, const SourceConfig& source) {
  Tokenizations known;
  const Shards shards = find_shards(path, known);
  Report report;
  std::unique_ptr<TokenFile> first;
  std::set<std::string> tokenizers;
  for (const std::string& shard : shards.paths) {
    std::unique_ptr<TokenFile> file = TokenFile::open(shard, source, &known);
    report.add(*file);
    if (!file->tokenizer().empty()) tokenizers.insert(file->tokenizer());
    if (!first) first = std::move(file);
  }
  if (!first) refuse(path + " has a tokenization.json that lists no shards");
  // Loaded before anything is printed, because it may throw.
  const std::optional<TokenTable> table = table_beside(shards.folder, first->tokenizer());
  std::printf("%s\n", path.c_str());
  line("format", std::string(format_name(first->format())) + ", " + counted(first->bits(), "bit") + " a token");
  line("shards", with_commas(shards.paths.size()));
  line("documents", with_commas(report.documents()));
  line("tokens", with_commas(report.tokens()));
  line("targets", report.targets_text());
  line("vocabulary", first->vocab() ? with_commas(*first->vocab()) : "not known");
  std::vector<std::string> digests(tokenizers.begin(), tokenizers.end());
  if (shards.made && digests.size() == 1) digests[0] = shards.made->name + " (" + digests[0] + ")";
  line("tokenizer", digests.empty() ? "not known" : join(digests, ", and of others "));
  const auto id = [](const std::optional<int64_t>& id) { return id ? with_commas(*id) : std::string("none"); };
  line("boundaries", first->has_trees()   ? "stored; documents are prefix trees of rollouts"
                     : first->documents() ? "stored"
                     : first->begin_id() || first->end_id()
                         ? "by tokens: begin " + id(first->begin_id()) + ", end " + id(first->end_id())
                         : "not known: each file is one document");
  report.print_histogram();
  print_beginning(*first, table);
}

void verify_tokens(const std::string& path, const SourceConfig& source) {
  Tokenizations known;
  const Shards shards = find_shards(path, known);
  int64_t tokens = 0;
  for (const std::string& shard : shards.paths) {
    const std::unique_ptr<TokenFile> file = TokenFile::open(shard, source, &known);
    file->verify();
    tokens += file->tokens();
    if (shards.made && file->tokenizer() != shards.made->tokenizer) {
      refuse(shard + " was made with the tokenizer " + file->tokenizer() + ", but " + shards.made->path + " says " +
             shards.made->tokenizer + ": they do not belong together");
    }
  }
  const bool table = shards.made && table_beside(shards.folder, shards.made->tokenizer).has_value();
  std::printf("%s: %s of %s, whole%s\n", path.c_str(), with_commas(shards.paths.size(), "shard").c_str(),
              with_commas(tokens, "token").c_str(),
              table ? ", and their tokens.table"
              : shards.made
                  ? ""
                  : "; there is no tokenization.json beside them, so only what the format itself stores was checked");
}

}  // namespace annulus
