// Megatron-LM's indexed datasets: a .bin with the tokens, and an .idx with the lengths of sequences, where they lie,
// and which of them make up a document.
#include <algorithm>
#include <filesystem>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "runtime/data/shards/flat_tokens.h"

namespace annulus {
namespace {

constexpr int64_t kIndexHeader = 34;
constexpr int64_t kSamples = 64;
constexpr const char* kTypes[] = {"", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"};

class Megatron : public FlatTokens {
 public:
  Megatron(const std::string& index, const std::string& data, std::shared_ptr<const Tokenization> made)
      : FlatTokens(TokenFormat::kMegatron, index, require_data(index, data)), index_("data", index) {
    if (index_.size() < kIndexHeader) refuse("it has " + with_commas(index_.size(), "byte") + ", less than its header");
    if (const auto version = index_.at<uint64_t>(9); version != 1) {
      refuse("it is of version " + std::to_string(version) + " of Megatron's index, but only version 1 is read");
    }
    const auto type = index_.at<uint8_t>(17);
    if (type != 4 && type != 8) {
      refuse("its tokens are of type " + std::to_string(type) +
             (type >= 1 && type <= 8 ? std::string(" (") + kTypes[type] + ")" : "") +
             ", but only 4 (int32) and 8 (uint16) are read");
    }
    width_ = type == 4 ? 4 : 2;
    bits_ = static_cast<int>(width_ * 8);
    const auto sequences = index_.at<uint64_t>(18), ends = index_.at<uint64_t>(26);
    const auto room = static_cast<uint64_t>(index_.size() - kIndexHeader);
    // There is one more byte for each sequence if modes are stored. No sum overflows, because counts are below the
    // file's size.
    const bool fits = sequences <= room / 12 && ends >= 1 && ends <= room / 8;
    const uint64_t need = sequences * 12 + ends * 8;
    if (!fits || (room != need && room != need + sequences)) {
      refuse("it says that it has " + std::to_string(sequences) + " sequences and " + std::to_string(ends) +
             " document indices, which does not fit its " + with_commas(index_.size(), "byte"));
    }
    sequences_ = static_cast<int64_t>(sequences);
    documents_ = static_cast<int64_t>(ends) - 1;
    pointers_ = kIndexHeader + sequences_ * 4;
    ends_ = pointers_ + sequences_ * 8;
    if (data_.size() % width_ != 0) {
      disagree("has " + with_commas(data_.size(), "byte") + ", which is not a whole number of tokens of " +
               counted(bits_, "bit"));
    }
    tokens_ = data_.size() / width_;
    if (index_.at<int64_t>(ends_) != 0 || index_.at<int64_t>(ends_ + *documents_ * 8) != sequences_) {
      refuse("its documents do not go from its first to its last sequence");
    }
    // Checks some sequences, the first and the last among them. visit_documents checks all.
    const int64_t samples = std::min(kSamples, sequences_);
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t s =
          samples < 2 ? 0 : static_cast<int64_t>(static_cast<__int128>(sequences_ - 1) * i / (samples - 1));
      const int64_t pointer = not_negative("place", s, index_.at<int64_t>(pointers_ + s * 8));
      const int64_t length = not_negative("length", s, index_.at<int32_t>(kIndexHeader + s * 4));
      const int64_t next =
          s + 1 < sequences_ ? not_negative("place", s + 1, index_.at<int64_t>(pointers_ + (s + 1) * 8)) : data_.size();
      if (pointer > data_.size() || next - pointer != length * width_ || (s == 0 && pointer != 0)) {
        disagree_at(s, pointer, length);
      }
    }
    if (sequences_ == 0 && tokens_ != 0)
      disagree("has " + with_commas(tokens_, "token") + ", but the .idx has no sequence");
    use(std::move(made), std::filesystem::path(data).filename().string());
    use_targets();
  }

  std::vector<std::string> paths() const override { return {data_.path(), index_.path()}; }

  void visit_documents(bool hashed, const DocumentVisitor& visit, int64_t limit) const override {
    const int64_t tokens = limit < 0 ? tokens_ : std::min(limit, tokens_);
    MappedArray<int64_t> ends(index_, ends_ + 8, *documents_);
    MappedArray<int64_t> pointers(index_, pointers_, sequences_);
    MappedArray<int32_t> lengths(index_, kIndexHeader, sequences_);
    int64_t sequence = 0, begin = 0;
    for (int64_t i = 0; i < *documents_ && (begin < tokens || tokens == tokens_); ++i) {
      const int64_t stop = ends.at(i);
      if (stop < 0) refuse("the end of document " + with_commas(i) + " is negative, " + with_commas(stop));
      if (stop < sequence || stop > sequences_) {
        refuse("document " + with_commas(i) + " ends at sequence " + with_commas(stop) + ", but begins at " +
               with_commas(sequence) + " of " + with_commas(sequences_));
      }
      int64_t end = begin;
      for (; sequence < stop; ++sequence) {
        const int64_t pointer = not_negative("place", sequence, pointers.at(sequence));
        const int64_t length = not_negative("length", sequence, lengths.at(sequence));
        if (pointer != end * width_ || length > tokens_ - end) disagree_at(sequence, pointer, length);
        end += length;
      }
      const int64_t cut = std::min(end, tokens);
      if (i + 1 == *documents_ && end != tokens_)
        disagree("has " + with_commas(tokens_, "token") + ", but the .idx has " + with_commas(end));
      visit(begin, cut - begin, hashed ? hash(begin, cut - begin) : 0);
      begin = end;
    }
    require_unchanged();
  }

 protected:
  void require_unchanged() const override {
    FlatTokens::require_unchanged();
    index_.require_unchanged();
  }

  void add_stored_fingerprint(Checksum& sum) const override {
    FlatTokens::add_stored_fingerprint(sum);
    add_ends(sum, index_);
  }

 private:
  static const std::string& require_data(const std::string& index, const std::string& data) {
    if (is_file(data)) return data;
    throw Error(ErrorKind::kInput, "data",
                index + " is the index of a Megatron pair, but its tokens, " + data + ", are missing: copy both files");
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorKind::kInput, "data", path_ + " was cut off or damaged: " + what + "; copy or make it again");
  }
  [[noreturn]] void disagree(const std::string& what) const {
    throw Error(ErrorKind::kInput, "data",
                data_.path() + " " + what + ": use the .bin and the .idx that were written together");
  }
  // Returns a number of a sequence, which counts something.
  int64_t not_negative(const char* what, int64_t sequence, int64_t value) const {
    if (value < 0) {
      refuse("the " + std::string(what) + " of sequence " + with_commas(sequence) + " is negative, " +
             with_commas(value));
    }
    return value;
  }
  // A sequence must begin where the one before it ends, and the last one must end with the file.
  [[noreturn]] void disagree_at(int64_t sequence, int64_t pointer, int64_t length) const {
    disagree("does not hold what the .idx says: sequence " + with_commas(sequence) + " of " +
             with_commas(length, "token") + " at byte " + with_commas(pointer) + " of " + with_commas(data_.size()) +
             ", which does not fit its neighbours");
  }

  MappedFile index_;
  int64_t width_ = 2;
  int64_t sequences_ = 0;
  int64_t pointers_ = 0, ends_ = 0;  // in bytes
};

}  // namespace

std::unique_ptr<TokenFile> open_megatron(const std::string& index, const std::string& data,
                                         std::shared_ptr<const Tokenization> made) {
  return std::make_unique<Megatron>(index, data, std::move(made));
}

}  // namespace annulus
