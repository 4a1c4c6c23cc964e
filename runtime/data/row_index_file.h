// Row indexes as files and in memory. Used by row_index.cc. A file rows-DIGEST.index (docs/reference/formats.md) has,
// in little-endian numbers:
//
//   head     "ANNROWS\0", u32 version 1, u32 24, zeros to byte 64
//   pieces   of training, then of validation: u64 token, place, count. The inputs are tokens [token, token + count) of
//            the source, all of one document, and the target of each is the token that follows it; place is row *
//            context + position in the row. Sorted by place; with packing = "stream" a piece may span several rows.
//            The highest bit of count is set for inputs of a prefix tree whose targets count in another row
//   hashes   u64: XXH3-64 of every 4,096 pieces
//   windows  u64: for each window of 65,536 documents of training, the number of pieces up to its end
//   tail     224 bytes: digest (32 characters), settings, the counts that `annulus pack` prints, XXH3-64 of the
//            two tables and of the tail itself
//
// Documents of 6 and 13 tokens, with context = 8, packing = "stream" and documents = true, have the pieces (0, 0, 5)
// and (6, 5, 12): row 0 holds inputs 0 to 4 and 6 to 8, row 1 inputs 9 to 16, and row 2 input 17 and 7 positions of
// padding. With documents = false token 6 is a target, too, and the pieces are (0, 0, 6) and (6, 6, 12). Opening an
// index checks the tables, the tail and at most 16 blocks of pieces; the other blocks are checked when they are first
// read.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/files.h"
#include "runtime/data/row_index.h"

namespace annulus {

// Takes the pieces of both parts; those of each part come in order.
class RowStore {
 public:
  virtual ~RowStore() = default;
  // Forgets all pieces added so far.
  virtual void restart() = 0;
  virtual void add(Split split, const PlacedPiece& piece) = 0;
};

// Fills a store and returns what the index records of it, including the digest.
using MakeRows = std::function<RowIndexFacts(RowStore&)>;

// trees: the corpus if it has trees, otherwise null; here and below.
std::shared_ptr<const RowIndex> rows_in_memory(const MakeRows& make, const Corpus* trees);

// The index at this path; null if it has another digest, or if its tables or the few blocks that are checked are
// damaged.
std::shared_ptr<const RowIndex> open_rows(const std::string& path, const std::string& digest, const Corpus* trees);

// Writes an index and replaces the file at this path.
void write_rows(FileSystem& files, const std::string& path, const MakeRows& make);

}  // namespace annulus
