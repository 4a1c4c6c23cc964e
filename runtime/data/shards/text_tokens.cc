// A text as a file of tokens, which are its bytes. It is not memory-mapped, because a source may have more texts than a
// process may have maps.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/descriptor.h"
#include "common/error.h"
#include "common/files.h"
#include "common/mapped_file.h"
#include "common/trace/beat.h"
#include "runtime/data/shards/flat_tokens.h"

namespace annulus {
namespace {

class TextTokens : public TokenFile {
 public:
  TextTokens(const std::string& path, const FileState& state) : TokenFile(TokenFormat::kText, path), state_(state) {
    bits_ = 8;
    vocab_ = 256;
    tokens_ = state.size();
    documents_ = 1;
  }

  void visit_documents(bool hashed, const DocumentVisitor& visit, int64_t limit) const override {
    const int64_t tokens = limit < 0 ? tokens_ : std::min(limit, tokens_);
    visit(0, tokens, hashed ? hash(0, tokens) : 0);
  }

  int64_t byte_of(int64_t token) const override { return token; }

 protected:
  void visit_raw(int64_t first, int64_t count, const RawVisitor& take) const override {
    if (count == 0) return;
    const auto unreadable = [this] {
      return Error(kind_of_errno(errno), "data", path_ + " cannot be read: " + std::strerror(errno));
    };
    const Descriptor fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (fd < 0) throw unreadable();
    char piece[kPiece * 16];
    while (count > 0) {
      const ssize_t n = ::pread(fd, piece, static_cast<size_t>(std::min<int64_t>(count, sizeof piece)), first);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw unreadable();
      if (n == 0) break;
      for (int64_t at = 0; at < n; at += kPiece) take(piece + at, std::min<int64_t>(kPiece, n - at));
      first += n;
      count -= n;
      beat();
    }
    if (FileState(fd, "data", path_) == state_ && count == 0) return;
    state_.require_unchanged("data", path_);
    throw Error(
        ErrorKind::kInput, "data",
        path_ + " was replaced by another file since the run began: texts must not change while a run reads them");
  }

  // visit_raw has checked what was read.
  void require_unchanged() const override {}

 private:
  FileState state_;
};

}  // namespace

std::unique_ptr<TokenFile> open_text(const std::string& path, const FileState& state) {
  return std::make_unique<TextTokens>(path, state);
}

}  // namespace annulus
