// See token_file.h. What the formats have in common, and how a file's format is found.
#include "runtime/data/shards/token_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "common/descriptor.h"
#include "common/error.h"
#include "common/files.h"
#include "common/mapped_file.h"
#include "common/text.h"
#include "runtime/data/shards/flat_tokens.h"
#include "runtime/data/shards/refuse.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

constexpr std::pair<TokenFormat, std::string_view> kNames[] = {{TokenFormat::kText, "text"},
                                                               {TokenFormat::kAnnulus, "annulus"},
                                                               {TokenFormat::kMegatron, "megatron"},
                                                               {TokenFormat::kLlmc, "llmc"},
                                                               {TokenFormat::kNanogpt, "nanogpt"}};

std::optional<TokenFormat> named_format(std::string_view name) {
  for (const auto& [format, its] : kNames) {
    if (its == name) return format;
  }
  return std::nullopt;
}

struct Look {
  FileState state;
  std::optional<TokenFormat> mark;  // the format that the first bytes show
};

Look look_at(const std::string& path) {
  const auto unreadable = [&] {
    return Error(kind_of_errno(errno), "data", path + " cannot be read: " + std::strerror(errno));
  };
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd < 0) throw unreadable();
  Look look{.state = FileState(fd, "data", path), .mark = {}};
  char head[16] = {};
  ssize_t n = 0;
  do n = ::pread(fd, head, sizeof head, 0);
  while (n < 0 && errno == EINTR);
  if (n < 0) throw unreadable();
  int32_t word = 0;
  std::memcpy(&word, head, sizeof word);
  if (std::memcmp(head, "ANNTOKEN", 8) == 0) look.mark = TokenFormat::kAnnulus;
  if (std::memcmp(head, "MMIDIDX\0\0", 9) == 0) look.mark = TokenFormat::kMegatron;
  if (word == 20240520 || word == 20240801) look.mark = TokenFormat::kLlmc;
  if (word == 20240522) {
    refuse_data(path +
                " is a file of llm.c for evaluation by multiple choice, not of tokens to train on: leave it out");
  }
  return look;
}

std::string with_ending(const std::string& path, std::string_view ending) {
  return fs::path(path).replace_extension(ending).string();
}

// Whether this .bin has an .idx of Megatron's beside it.
bool has_index(const std::string& path) {
  const std::string index = with_ending(path, ".idx");
  return path.ends_with(".bin") && is_file(index) && look_at(index).mark == TokenFormat::kMegatron;
}

}  // namespace

std::string_view format_name(TokenFormat format) { return kNames[static_cast<size_t>(format)].second; }

std::unique_ptr<TokenFile> TokenFile::open(const std::string& path, const SourceConfig& source,
                                           Tokenizations* tokenizations) {
  const Look look = look_at(path);
  const std::optional<TokenFormat> said = named_format(source.format);
  if (!said && source.format != "auto") {
    throw Error(ErrorKind::kInternal, "data", "the format \"" + source.format + "\" was not checked");
  }
  std::optional<TokenFormat> format = look.mark;
  if (!format && has_index(path)) format = TokenFormat::kMegatron;
  if (format && said && *format != *said) {
    refuse_data(path + " is a file of the format \"" + std::string(format_name(*format)) +
                "\", but its source has format = \"" + source.format + "\": correct that, or leave it out");
  }
  if (!format) format = said;
  Tokenizations own;
  Tokenizations& known = tokenizations ? *tokenizations : own;
  if (format == TokenFormat::kText) return open_text(path, look.state);
  if (format == TokenFormat::kAnnulus && look.mark) return open_annulus(path);
  if (format == TokenFormat::kMegatron && (look.mark || has_index(path))) {
    const std::string data = with_ending(path, ".bin");
    return open_megatron(look.mark ? path : with_ending(path, ".idx"), data, known.of_file(data));
  }
  const auto made = known.of_file(path);
  if (!format && made) format = named_format(made->format);
  if (format == TokenFormat::kLlmc && look.mark) return open_llmc(path, source, made);
  if (format == TokenFormat::kNanogpt) return open_nanogpt(path, source, made);
  if (format) {
    refuse_data(path + " is not a file of the format \"" + std::string(format_name(*format)) +
                "\": it does not begin with that format's mark" +
                (format == TokenFormat::kMegatron ? ", and no .idx that does lies beside it" : "") +
                "; it may be of another format, or damaged");
  }
  if (path.ends_with(".bin")) {
    refuse_data(path +
                " has no mark that says what it holds: set format = \"nanogpt\" for tokens without a header (width = " +
                "16 or 32), \"text\" for bytes, or bring the .idx of a Megatron pair");
  }
  return open_text(path, look.state);
}

void TokenFile::read(int64_t first, int64_t count, int64_t* to, int64_t stride) const {
  const int64_t reach = count < 1 ? 0 : (count - 1) * stride + 1;
  if (first < 0 || count < 0 || reach > tokens_ - first) {
    throw Error(ErrorKind::kInternal, "data", path_ + ": tokens beyond the file were asked for");
  }
  int64_t next = 0;  // the next token that is taken, counted from the beginning of the piece
  visit_raw(first, reach, [&](const void* raw, int64_t n) {
    const auto widen = [&](auto* tokens) {
      for (; next < n; next += stride) *to++ = tokens[next];
      next -= n;
    };
    if (bits_ == 8) widen(static_cast<const uint8_t*>(raw));
    if (bits_ == 16) widen(static_cast<const uint16_t*>(raw));
    if (bits_ == 32) widen(static_cast<const uint32_t*>(raw));
  });
  require_unchanged();
}

Branch TokenFile::branch_at(int64_t) const {
  throw Error(ErrorKind::kInternal, "data", path_ + ": a branch was asked for, but it holds no trees");
}

void TokenFile::visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const {
  if (count > 0) visit(first, count, 1);
}

uint64_t TokenFile::hash(int64_t first, int64_t count) const {
  Hash64 sum;
  visit_raw(first, count, [&](const void* raw, int64_t n) { add_to_hash(sum, raw, n); });
  require_unchanged();
  return sum.take();
}

void TokenFile::add_to_hash(Hash64& sum, const void* raw, int64_t count) const {
  if (bits_ == 32) {
    sum.update(raw, static_cast<size_t>(count) * 4);
    return;
  }
  uint32_t wide[kPiece];
  if (bits_ == 8) std::copy_n(static_cast<const uint8_t*>(raw), count, wide);
  if (bits_ == 16) std::copy_n(static_cast<const uint16_t*>(raw), count, wide);
  sum.update(wide, static_cast<size_t>(count) * 4);
}

void TokenFile::use(std::shared_ptr<const Tokenization> made_by, const std::string& name) {
  if (!made_by) return;
  made_by_ = std::move(made_by);
  made_as_ = &made_by_->shards.at(name);
  vocab_ = made_by_->vocab;
  tokenizer_ = made_by_->tokenizer;
  begin_ = made_by_->begin;
  end_ = made_by_->end;
  if (made_as_->tokens != tokens_ || (documents_ && made_as_->documents != *documents_)) {
    refuse_data(path_ + " has " + with_commas(tokens_, "token") +
                (documents_ ? " in " + with_commas(*documents_, "document") : "") + ", but " + made_by_->path +
                " says " + with_commas(made_as_->tokens) + " in " + with_commas(made_as_->documents, "document") +
                ": the file was cut or replaced since; run `annulus tokenize` again");
  }
}

void TokenFile::verify() const {
  if (vocab_) {
    int64_t token = 0;
    visit_raw(0, tokens_, [&](const void* raw, int64_t n) {
      const auto check = [&](auto* tokens) {
        const auto* beyond = std::find_if(tokens, tokens + n, [&](int64_t id) { return id >= *vocab_; });
        if (beyond == tokens + n) return;
        token += beyond - tokens;
        refuse_data(paths()[0] + ": token " + with_commas(token) + " (byte " + with_commas(byte_of(token)) + ") is " +
                    with_commas(*beyond) + ", but the vocabulary has " + with_commas(*vocab_) +
                    " ids: the file is damaged, of another width, or of another tokenizer");
      };
      if (bits_ == 8) check(static_cast<const uint8_t*>(raw));
      if (bits_ == 16) check(static_cast<const uint16_t*>(raw));
      if (bits_ == 32) check(static_cast<const uint32_t*>(raw));
      token += n;
    });
  }
  verify_stored();
  int64_t documents = 0;
  visit_documents(false, [&](int64_t, int64_t, uint64_t) { ++documents; });
  if (!made_as_) return;
  if (documents != made_as_->documents) {
    refuse_data(path_ + " has " + with_commas(documents, "document") + ", but " + made_by_->path + " says " +
                with_commas(made_as_->documents) + ": run `annulus tokenize` again");
  }
  require_made(paths(), made_as_->checksum);
}

void TokenFile::require_made(const std::vector<std::string>& files, const std::string& made) const {
  Checksum sum;
  for (const std::string& path : files) add_content(sum, MappedFile("data", path));
  if (const std::string got = sum.hex(); got != made) {
    refuse_data(join(files, " and ") + ": checksum " + got + ", but " + made_by_->path + " says " + made +
                ": the file was damaged since it was written; run `annulus tokenize` again");
  }
}

void TokenFile::add_fingerprint(Checksum& sum) const {
  const int64_t facts[] = {static_cast<int64_t>(format_), bits_, tokens_, documents_.value_or(-1)};
  sum.update(facts, sizeof facts);
  if (!documents_) {
    const int64_t ids[] = {begin_.value_or(-1), end_.value_or(-1)};
    sum.update(ids, sizeof ids);
  }
  add_stored_fingerprint(sum);
}

}  // namespace annulus
