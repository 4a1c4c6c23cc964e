// See row_index_file.h.
//
// What is known only at the end stands at the end, so that pieces are written as they are found: head, pieces of
// training, pieces of validation, a hash of each block of pieces, the ends of windows, tail.
#include "runtime/data/row_index_file.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/mapped_file.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr uint32_t kVersion = 1;
constexpr int64_t kHead = 64;
constexpr int64_t kBlock = 4096;  // pieces
constexpr int64_t kSampledBlocks = 16;
constexpr int64_t kPiece = sizeof(PlacedPiece);
static_assert(kPiece == 24 && std::endian::native == std::endian::little);

struct Head {
  char magic[8] = {'A', 'N', 'N', 'R', 'O', 'W', 'S', 0};
  uint32_t version = kVersion, piece_bytes = kPiece;
  char zeros[48] = {};
};
static_assert(sizeof(Head) == kHead);

struct TailCounts {
  int64_t pieces, documents, tokens, rows, targets, first_tokens, lone_tokens;
};

struct Tail {
  char digest[32];
  int64_t context, packing, documents, refuse_long, tail_held_out;
  double validation_fraction;
  TailCounts parts[2];
  int64_t windows;
  uint64_t tables;  // XXH3-64 of the hashes of blocks and the ends of windows
  char magic[8];
  uint64_t hash;  // XXH3-64 of the tail before it
};
static_assert(sizeof(Tail) == 224);

uint64_t hash_of(const Tail& tail) { return hash64(&tail, offsetof(Tail, hash)); }

Tail tail_of(const RowIndexFacts& facts) {
  Tail tail{};
  std::memcpy(tail.digest, facts.digest.data(), std::min<size_t>(facts.digest.size(), sizeof tail.digest));
  const PackSettings& s = facts.settings;
  tail.context = s.context;
  tail.packing = static_cast<int64_t>(s.packing);
  tail.documents = s.documents;
  tail.refuse_long = s.refuse_long;
  tail.tail_held_out = facts.tail_held_out;
  tail.validation_fraction = s.validation_fraction;
  for (size_t i = 0; i < 2; ++i) {
    const PartCounts& c = facts.counts[i];
    tail.parts[i] = {facts.pieces[i], c.documents, c.tokens, c.rows, c.targets, c.first_tokens, c.lone_tokens};
  }
  tail.windows = static_cast<int64_t>(facts.windows.size());
  std::memcpy(tail.magic, Head().magic, sizeof tail.magic);
  return tail;
}

// All facts but the windows.
RowIndexFacts facts_of(const Tail& tail) {
  RowIndexFacts facts;
  facts.digest.assign(tail.digest, sizeof tail.digest);
  facts.settings = {tail.context, static_cast<Packing>(tail.packing), tail.documents != 0, tail.validation_fraction,
                    tail.refuse_long != 0};
  facts.tail_held_out = tail.tail_held_out != 0;
  for (size_t i = 0; i < 2; ++i) {
    const TailCounts& c = tail.parts[i];
    facts.pieces[i] = c.pieces;
    facts.counts[i] = {c.documents, c.tokens, c.rows, c.targets, c.first_tokens, c.lone_tokens};
  }
  return facts;
}

// ---- in memory

class MemoryRows : public RowIndex, public RowStore {
 public:
  MemoryRows(const MakeRows& make, const Corpus* trees) : RowIndex(trees) {
    facts_ = make(*this);
    pieces_[0].insert(pieces_[0].end(), pieces_[1].begin(), pieces_[1].end());
    pieces_[1] = {};
  }

  void restart() override { pieces_ = {}; }
  void add(Split split, const PlacedPiece& piece) override { pieces_[static_cast<size_t>(split)].push_back(piece); }

 protected:
  void read_pieces(int64_t first, int64_t count, PlacedPiece* to) const override {
    std::copy_n(pieces_[0].begin() + first, count, to);
  }

 private:
  std::array<std::vector<PlacedPiece>, 2> pieces_;
};

// ---- files

// Thrown only within this file: why an existing index cannot be used.
struct Unusable {
  std::string what;
};

class MappedRows : public RowIndex {
 public:
  MappedRows(const std::string& path, const Corpus* trees) : RowIndex(trees), file_("data", path) {
    if (file_.size() < kHead + static_cast<int64_t>(sizeof(Tail))) throw Unusable{"it was cut off"};
    const auto head = file_.at<Head>(0);
    const auto tail = file_.at<Tail>(file_.size() - static_cast<int64_t>(sizeof(Tail)));
    const Head expected;
    if (std::memcmp(&head, &expected, sizeof head) != 0) throw Unusable{"it is of another format or version"};
    if (hash_of(tail) != tail.hash || std::memcmp(tail.magic, expected.magic, sizeof tail.magic) != 0) {
      throw Unusable{"it was cut off or damaged at its end"};
    }
    facts_ = facts_of(tail);
    const int64_t most = file_.size() / kPiece;
    if (tail.parts[0].pieces < 0 || tail.parts[0].pieces > most || tail.parts[1].pieces < 0 ||
        tail.parts[1].pieces > most || tail.windows < 0 || tail.windows > most) {
      throw Unusable{"its counts do not fit its size"};
    }
    pieces_ = tail.parts[0].pieces + tail.parts[1].pieces;
    blocks_ = (pieces_ + kBlock - 1) / kBlock;
    const int64_t tables = kHead + pieces_ * kPiece;
    if (file_.size() != tables + (blocks_ + tail.windows) * 8 + static_cast<int64_t>(sizeof(Tail))) {
      throw Unusable{"its counts do not fit its size"};
    }
    std::vector<uint64_t> words(static_cast<size_t>(blocks_ + tail.windows));
    file_.copy(tables, static_cast<int64_t>(words.size() * 8), words.data());
    if (hash64(words.data(), words.size() * 8) != tail.tables) throw Unusable{"its tables are damaged"};
    hashes_.assign(words.begin(), words.begin() + blocks_);
    checked_ = std::vector<std::atomic<bool>>(static_cast<size_t>(blocks_));
    facts_.windows.assign(words.begin() + blocks_, words.end());
    const int64_t samples = std::min(kSampledBlocks, blocks_);
    for (int64_t i = 0; i < samples; ++i) check_block(samples < 2 ? 0 : (blocks_ - 1) * i / (samples - 1));
  }

  std::string path() const override { return file_.path(); }

 protected:
  // Checks each block against its hash when it is first read, because opening has checked only a few of them.
  void read_pieces(int64_t first, int64_t count, PlacedPiece* to) const override {
    for (int64_t block = first / kBlock; block * kBlock < first + count; ++block) {
      std::atomic<bool>& checked = checked_[static_cast<size_t>(block)];
      if (checked.load(std::memory_order_relaxed)) continue;
      require_block(block);
      checked.store(true, std::memory_order_relaxed);
    }
    copy_pieces(first, count, to);
  }
  void require_unchanged() const override { file_.require_unchanged(); }

  void verify_stored() const override {
    for (int64_t i = 0; i < blocks_; ++i) require_block(i);
  }

 private:
  void copy_pieces(int64_t first, int64_t count, PlacedPiece* to) const {
    file_.copy(kHead + first * kPiece, count * kPiece, to);
  }

  void require_block(int64_t i) const {
    try {
      check_block(i);
    } catch (const Unusable& unusable) {
      throw Error(ErrorKind::kInput, "data",
                  file_.path() + " is damaged: " + unusable.what + "; remove it, and it is made again from the tokens");
    }
  }

  void check_block(int64_t i) const {
    std::vector<PlacedPiece> block(static_cast<size_t>(std::min(kBlock, pieces_ - i * kBlock)));
    copy_pieces(i * kBlock, static_cast<int64_t>(block.size()), block.data());
    if (hash64(block.data(), block.size() * kPiece) != hashes_[static_cast<size_t>(i)]) {
      throw Unusable{"pieces " + with_commas(i * kBlock) + " and following are not those that were written"};
    }
  }

  MappedFile file_;
  int64_t pieces_ = 0, blocks_ = 0;
  std::vector<uint64_t> hashes_;
  mutable std::vector<std::atomic<bool>> checked_;  // blocks
};

class FileStore : public RowStore {
 public:
  FileStore(FileSystem& files, std::string path)
      : files_(files), path_(std::move(path)), beside_(path_ + ".held-out") {}
  ~FileStore() override {
    held_out_.reset();
    try {
      files_.remove_all(beside_);
    } catch (...) {  // what is left is replaced by the next store; nothing reads it
    }
  }

  void restart() override {
    hashes_.clear();
    block_.clear();
    held_out_block_.clear();
    held_out_.reset();
    out_ = files_.create(path_);
    const Head head;
    out_->write(&head, sizeof head);
  }

  void add(Split split, const PlacedPiece& piece) override {
    std::vector<PlacedPiece>& block = split == Split::kTrain ? block_ : held_out_block_;
    block.push_back(piece);
    if (static_cast<int64_t>(block.size()) == kBlock) split == Split::kTrain ? flush() : flush_held_out();
  }

  void finish(const RowIndexFacts& facts) {
    append_held_out();
    flush();
    out_->write(hashes_.data(), hashes_.size() * 8);
    out_->write(facts.windows.data(), facts.windows.size() * 8);
    Tail tail = tail_of(facts);
    Hash64 tables;
    tables.update(hashes_.data(), hashes_.size() * 8);
    tables.update(facts.windows.data(), facts.windows.size() * 8);
    tail.tables = tables.take();
    tail.hash = hash_of(tail);
    out_->write(&tail, sizeof tail);
    out_->sync();
    out_->close();
  }

 private:
  void flush() {
    if (block_.empty()) return;
    hashes_.push_back(hash64(block_.data(), block_.size() * kPiece));
    out_->write(block_.data(), block_.size() * kPiece);
    block_.clear();
  }

  // Pieces of validation are found together with those of training but stand after them: another file holds them until
  // then.
  void flush_held_out() {
    if (!held_out_) held_out_ = files_.create(beside_);
    held_out_->write(held_out_block_.data(), held_out_block_.size() * kPiece);
    held_out_block_.clear();
  }

  void append_held_out() {
    const std::vector<PlacedPiece> last = std::move(held_out_block_);
    held_out_block_ = {};
    if (held_out_) {
      held_out_->close();
      held_out_.reset();
      const MappedFile file("data", beside_);
      for (int64_t at = 0; at < file.size(); at += kPiece) add(Split::kTrain, file.at<PlacedPiece>(at));
    }
    for (const PlacedPiece& piece : last) add(Split::kTrain, piece);
  }

  FileSystem& files_;
  std::string path_, beside_;
  std::unique_ptr<OutputFile> out_, held_out_;
  std::vector<PlacedPiece> block_, held_out_block_;
  std::vector<uint64_t> hashes_;
};

}  // namespace

std::shared_ptr<const RowIndex> rows_in_memory(const MakeRows& make, const Corpus* trees) {
  return std::make_shared<MemoryRows>(make, trees);
}

std::shared_ptr<const RowIndex> open_rows(const std::string& path, const std::string& digest, const Corpus* trees) {
  if (!is_file(path)) return nullptr;
  try {
    auto rows = std::make_shared<const MappedRows>(path, trees);
    return rows->digest() == digest ? rows : nullptr;
  } catch (const Unusable&) {
    return nullptr;
  }
}

void write_rows(FileSystem& files, const std::string& path, const MakeRows& make) {
  replace_file(files, path, [&](const std::string& beside) {
    FileStore store(files, beside);
    store.finish(make(store));
  });
}

}  // namespace annulus
