// See row_index.h. This file makes indexes, and reads them wherever they lie.
#include "runtime/data/row_index.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>

#include "common/checksum.h"
#include "common/error.h"
#include "common/interrupt.h"
#include "common/text.h"
#include "common/trace/beat.h"
#include "runtime/data/permutation.h"
#include "runtime/data/row_index_file.h"
#include "runtime/data/shards/refuse.h"
#include "runtime/data/tree_packing.h"

namespace annulus {
namespace {

std::string digest_of(const std::string& text) { return checksum(text.data(), text.size()); }

// Makes one part: passes the positions of its documents to its packer.
class PartMaker : public Packer::Sink {
 public:
  // corpus: null if only rests of documents are added.
  PartMaker(Split split, const Corpus* corpus, RowIndexFacts& facts, RowStore& store)
      : split_(split),
        corpus_(corpus),
        settings_(facts.settings),
        counts_(facts.counts[static_cast<size_t>(split)]),
        pieces_(facts.pieces[static_cast<size_t>(split)]),
        facts_(facts),
        store_(store),
        packer_(facts.settings.packing, facts.settings.context, *this) {
    if (corpus != nullptr && corpus->has_trees()) trees_.emplace(*corpus, settings_.context, packer_);
  }

  void add_document(int64_t begin, int64_t length) {
    beat();
    ++counts_.documents;
    counts_.tokens += length;
    if (length == 0) return;
    if (trees_) {
      add_branches(begin, begin + length);
      return;
    }
    const bool joined = !settings_.units_are_documents() && begin == open_.token + open_.count;
    end_document(joined);
    open_ = {begin, length};
    unit_tokens_ = joined ? unit_tokens_ + length : length;
  }

  // Adds positions whose first token was a target, or was left out, in another row.
  void add_rest(int64_t token, int64_t positions) {
    ++counts_.documents;
    counts_.tokens += positions;
    if (trees_) {
      trees_->add(corpus_->branch_at(token));
    } else {
      packer_.add(token, positions);
    }
  }

  void finish() {
    end_document(false);
    if (trees_) trees_->finish();
    packer_.finish();
    counts_.rows = packer_.rows();
    counts_.targets = packer_.targets();
  }

  void add(const PlacedPiece& piece) override {
    ++pieces_;
    store_.add(split_, piece);
  }
  void end_window() override {
    if (interrupted()) {
      throw Error(ErrorKind::kResource, "data", "packing was interrupted: nothing of the row index is kept");
    }
    if (split_ == Split::kTrain) facts_.windows.push_back(static_cast<uint64_t>(pieces_));
  }

 private:
  void add_branches(int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end;) {
      const Branch branch = corpus_->branch_at(at);
      if (branch.begin != at || branch.length > end - at || (at == begin && branch.after >= 0) ||
          (branch.after >= 0 && branch.after < begin)) {
        refuse_data("the prefix tree at " + corpus_->where(begin) +
                    " is damaged: check the shard by `annulus tokenize --verify`");
      }
      ++(branch.length == 1 ? counts_.lone_tokens : counts_.first_tokens);
      trees_->add(branch);
      at += branch.length;
    }
  }

  // Passes on the document that was added last. Its last token is an input only if the unit goes on: then its target is
  // the first token of the next document.
  void end_document(bool unit_goes_on) {
    if (open_.count == 0) return;
    if (!unit_goes_on) ++(unit_tokens_ == 1 ? counts_.lone_tokens : counts_.first_tokens);
    if (settings_.refuse_long && settings_.packing != Packing::kStream && open_.count - 1 > settings_.context) {
      throw Error(ErrorKind::kInput, "data",
                  "the document at " + corpus_->where(open_.token) + " has " + with_commas(open_.count, "token") +
                      ", but a row takes " + with_commas(settings_.context + 1) +
                      " (data.context + 1): lengthen data.context, divide or leave out the document, or set " +
                      "data.long_documents = \"cut\"");
    }
    packer_.add(open_.token, unit_goes_on ? open_.count : open_.count - 1);
    open_ = {};
  }

  Split split_;
  const Corpus* corpus_;
  const PackSettings& settings_;
  PartCounts& counts_;
  int64_t& pieces_;
  RowIndexFacts& facts_;
  RowStore& store_;
  Packer packer_;
  std::optional<TreePacker> trees_;
  Piece open_;               // the tokens of the last document; without any: there is none
  int64_t unit_tokens_ = 0;  // of its unit, so far
};

RowIndexFacts split_and_pack(const Corpus& corpus, const PackSettings& settings, bool tail, RowStore& store) {
  RowIndexFacts facts;
  facts.settings = settings;
  facts.tail_held_out = tail;
  store.restart();
  PartMaker train(Split::kTrain, &corpus, facts, store), validation(Split::kValidation, &corpus, facts, store);
  const double fraction = settings.validation_fraction;
  if (tail) {
    const auto held_out = static_cast<int64_t>(std::ceil(static_cast<double>(corpus.tokens()) * fraction));
    const int64_t cut = corpus.tokens() - std::min(held_out, corpus.tokens());
    corpus.visit_documents(false, [&](int64_t begin, int64_t length, uint64_t) {
      if (corpus.has_trees()) {  // they are not cut
        (begin > 0 && begin + length > cut ? validation : train).add_document(begin, length);
        return;
      }
      const int64_t before = std::clamp<int64_t>(cut - begin, 0, length);
      if (begin < cut) train.add_document(begin, before);
      if (begin >= cut || before < length) validation.add_document(begin + before, length - before);
    });
  } else {
    corpus.visit_documents(fraction > 0, [&](int64_t begin, int64_t length, uint64_t hash) {
      const bool held_out = fraction > 0 && static_cast<double>(hash) * 0x1p-64 < fraction;
      (held_out ? validation : train).add_document(begin, length);
    });
  }
  train.finish();
  validation.finish();
  return facts;
}

MakeRows rows_of(const Corpus& corpus, const PackSettings& settings, const std::string& digest) {
  return [&corpus, settings, digest](RowStore& store) {
    RowIndexFacts facts = split_and_pack(corpus, settings, false, store);
    const PartCounts& held_out = facts.counts[1];
    if (settings.validation_fraction > 0 && (held_out.targets == 0 || held_out.tokens > corpus.tokens() / 2)) {
      facts = split_and_pack(corpus, settings, true, store);
    }
    facts.digest = digest;
    return facts;
  };
}

std::string digest_of(const Corpus& corpus, const PackSettings& settings) {
  // In the rows "1" of units of several documents, a piece was a whole unit.
  const std::string rules = settings.units_are_documents() ? "rows 1 of " : "rows 2 of ";
  return digest_of(rules + corpus.fingerprint() + " " + settings.text());
}

const Corpus* trees_of(const Corpus& corpus) { return corpus.has_trees() ? &corpus : nullptr; }

std::shared_ptr<const RowIndex> find_or_write(FileSystem& files, const std::string& folder, const std::string& digest,
                                              const MakeRows& make, const Corpus* trees) {
  const std::string path = folder + "/" + RowIndex::file_name(digest);
  if (auto found = open_rows(path, digest, trees)) return found;
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) files.make_folder(folder);
  write_rows(files, path, make);
  auto made = open_rows(path, digest, trees);
  if (!made) throw Error(ErrorKind::kResource, "data", path + " was written but cannot be read back: check its disk");
  return made;
}

}  // namespace

std::string RowIndex::file_name(std::string_view digest) { return "rows-" + std::string(digest) + ".index"; }

std::shared_ptr<const RowIndex> RowIndex::make(const Corpus& corpus, const PackSettings& settings) {
  return rows_in_memory(rows_of(corpus, settings, digest_of(corpus, settings)), trees_of(corpus));
}

std::shared_ptr<const RowIndex> RowIndex::find(const Corpus& corpus, const PackSettings& settings,
                                               const std::string& folder) {
  const std::string digest = digest_of(corpus, settings);
  return open_rows(folder + "/" + file_name(digest), digest, trees_of(corpus));
}

std::shared_ptr<const RowIndex> RowIndex::find_or_make(const Corpus& corpus, const PackSettings& settings,
                                                       const std::string& folder, FileSystem& files) {
  const std::string digest = digest_of(corpus, settings);
  return find_or_write(files, folder, digest, rows_of(corpus, settings, digest), trees_of(corpus));
}

std::shared_ptr<const RowIndex> RowIndex::remaining(const RowIndex& before, const RowsLeft& left,
                                                    const PackSettings& settings, const std::string& folder,
                                                    FileSystem& files) {
  if (before.settings().units_are_documents() != settings.units_are_documents()) {
    throw Error(
        ErrorKind::kInput, "data",
        "whether documents are kept apart cannot change within an epoch: keep data.documents and data.packing as they "
        "were, or begin another run");
  }
  const std::string digest = digest_of("rows 1 left of " + before.digest() + " key " + std::to_string(left.key) +
                                       " from " + std::to_string(left.drawn) + " " + settings.text());
  const MakeRows make = [&](RowStore& store) {
    RowIndexFacts facts;
    facts.settings = settings;
    facts.digest = digest;
    store.restart();
    PartMaker train(Split::kTrain, before.trees_, facts, store);
    before.visit_left(left, [&](const Piece& piece) { train.add_rest(piece.token, piece.count); });
    train.finish();
    return facts;
  };
  return folder.empty() ? rows_in_memory(make, before.trees_)
                        : find_or_write(files, folder, digest, make, before.trees_);
}

void RowIndex::visit_left(const RowsLeft& left, const std::function<void(const Piece&)>& visit) const {
  const int64_t n = rows(Split::kTrain), context = settings().context;
  // Where units are documents, pieces with neighbouring tokens are of one document, which was cut at the ends of rows.
  // Elsewhere such pieces are of two documents.
  const bool join = settings().units_are_documents();
  std::vector<bool> is_left(static_cast<size_t>(n));
  const KeyedPermutation order(n, left.key);
  for (int64_t i = left.drawn; i < n; ++i) is_left[static_cast<size_t>(order.at(i))] = true;
  Piece open;  // the next piece may continue it
  const auto take = [&](const Piece& piece) {
    if (join && piece.token == open.token + open.count) {
      open.count += piece.count;
      return;
    }
    if (open.count > 0) visit(open);
    open = piece;
  };
  std::vector<PlacedPiece> placed;
  std::vector<Piece> window;
  int64_t first = 0;
  for (const uint64_t end : facts_.windows) {
    placed.resize(static_cast<size_t>(end) - static_cast<size_t>(first));
    read_pieces(first, static_cast<int64_t>(placed.size()), placed.data());
    first = static_cast<int64_t>(end);
    window.clear();
    for (const PlacedPiece& p : placed) {
      if (p.repeated) continue;
      const auto token = static_cast<int64_t>(p.token), place = static_cast<int64_t>(p.place);
      const int64_t stop = place + static_cast<int64_t>(p.count);
      // A piece of a stream extends over many rows; neighbouring rows of it that are left become one piece.
      const size_t begin = window.size();
      for (int64_t at = place; at < stop;) {
        const int64_t row_end = std::min(stop, (at / context + 1) * context);
        if (is_left.at(static_cast<size_t>(at / context))) {
          if (window.size() > begin && window.back().token + window.back().count == token + at - place) {
            window.back().count += row_end - at;
          } else {
            window.push_back({token + at - place, row_end - at});
          }
        }
        at = row_end;
      }
    }
    std::sort(window.begin(), window.end(), [](const Piece& a, const Piece& b) { return a.token < b.token; });
    for (const Piece& piece : window) take(piece);
  }
  if (open.count > 0) visit(open);
  require_unchanged();
}

void RowIndex::damaged(const std::string& what) const {
  throw Error(ErrorKind::kInput, "data",
              "the row index " + path() + " is damaged: " + what + "; remove it, and it is made again from the tokens");
}

// The part [begin, end) of a piece, both counted from its first token.
Piece RowIndex::piece_of(const PlacedPiece& placed, uint64_t begin, uint64_t end) const {
  Piece piece{static_cast<int64_t>(placed.token + begin), static_cast<int64_t>(end - begin)};
  if (trees_ == nullptr) return piece;
  const Branch branch = trees_->branch_at(piece.token);
  if (branch.begin != piece.token || piece.count >= branch.length) damaged("a piece is no branch of a tree");
  piece.after = branch.after;
  piece.repeated = placed.repeated != 0;
  return piece;
}

std::vector<Piece> RowIndex::row(Split split, int64_t r) const {
  if (r < 0 || r >= rows(split)) throw Error(ErrorKind::kInternal, "data", "a row beyond the index was asked for");
  const auto context = static_cast<uint64_t>(settings().context);
  const uint64_t begin = static_cast<uint64_t>(r) * context, end = begin + context;
  const int64_t first = split == Split::kTrain ? 0 : facts_.pieces[0];
  const int64_t last = first + facts_.pieces[static_cast<size_t>(split)];
  // The first piece that ends after the row's beginning.
  int64_t low = first, high = last;
  PlacedPiece p;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    read_pieces(middle, 1, &p);
    if (p.place + p.count > begin) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  std::vector<Piece> pieces;
  uint64_t at = begin;
  constexpr int64_t kBatch = 32;
  PlacedPiece batch[kBatch];
  for (int64_t i = low; i < last && at < end; i += kBatch) {
    const int64_t n = std::min(kBatch, last - i);
    read_pieces(i, n, batch);
    for (int64_t j = 0; j < n && batch[j].place < end; ++j) {
      const PlacedPiece& q = batch[j];
      const uint64_t stop = std::min(q.place + q.count, end);
      if (q.place > at || stop <= at) damaged("row " + with_commas(r) + " has a gap");
      pieces.push_back(piece_of(q, at - q.place, stop - q.place));
      at = stop;
    }
    if (batch[n - 1].place >= end) break;
  }
  require_unchanged();
  if (pieces.empty()) damaged("row " + with_commas(r) + " has no tokens");
  return pieces;
}

void RowIndex::verify() const {
  verify_stored();
  for (const Split split : {Split::kTrain, Split::kValidation}) verify_part(split);
}

void RowIndex::verify_part(Split split) const {
  const PartCounts& its = counts(split);
  const auto context = static_cast<uint64_t>(settings().context);
  const auto targets = static_cast<uint64_t>(its.targets);
  const int64_t first = split == Split::kTrain ? 0 : facts_.pieces[0];
  uint64_t end = 0, sum = 0, rows = 0;
  const int64_t n = facts_.pieces[static_cast<size_t>(split)];
  constexpr int64_t kBatch = 4096;
  std::vector<PlacedPiece> batch;
  for (int64_t i = 0; i < n; i += kBatch) {
    batch.resize(static_cast<size_t>(std::min(kBatch, n - i)));
    read_pieces(first + i, static_cast<int64_t>(batch.size()), batch.data());
    for (const PlacedPiece& p : batch) {
      // A piece follows the one before it, or begins the next row.
      const bool follows = p.place == end || p.place == (end + context - 1) / context * context;
      const bool in_row = settings().packing == Packing::kStream || p.place % context + p.count <= context;
      const uint64_t counts = p.repeated ? 0 : p.count;
      if (p.count == 0 || counts > targets - sum || (p.repeated && trees_ == nullptr) || !follows || !in_row) {
        damaged("a piece of " + counted(p.count, "position") + " lies at " + std::to_string(p.place) +
                ", after one that ends at " + std::to_string(end));
      }
      end = p.place + p.count;
      sum += counts;
      rows = (end + context - 1) / context;
    }
  }
  if (sum != targets || rows != static_cast<uint64_t>(its.rows) || its.targets + its.left_out() != its.tokens) {
    damaged("it has " + counted(sum, "position") + " in " + counted(rows, "row") + ", not " +
            std::to_string(its.targets) + " in " + std::to_string(its.rows));
  }
}

}  // namespace annulus
