// Row indexes as files (docs/reference/formats.md) and in memory. Used by row_index.cc.
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

std::shared_ptr<const RowIndex> rows_in_memory(const MakeRows& make);

// The index at this path; null if it has another digest, or if its tables or the few blocks that are checked are
// damaged.
std::shared_ptr<const RowIndex> open_rows(const std::string& path, const std::string& digest);

// Writes an index and replaces the file at this path.
void write_rows(FileSystem& files, const std::string& path, const MakeRows& make);

}  // namespace annulus
