// Row indices as files (docs/formats.md) and in memory. Used by row_index.cc.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "common/files.h"
#include "data/row_index.h"

namespace annulus {

// Takes the pieces of both parts, those of each in their order.
class RowStore {
 public:
  virtual ~RowStore() = default;
  // Forgets what came before.
  virtual void restart() = 0;
  virtual void add(Split split, const PlacedPiece& piece) = 0;
};

// Fills a store and says what of; `digest` is set by the caller.
using MakeRows = std::function<RowIndexFacts(RowStore&)>;

std::shared_ptr<const RowIndex> rows_in_memory(const MakeRows& make);

// The index at this path, where it is whole, as far as a bounded part of it shows, and of this digest; else null.
std::shared_ptr<const RowIndex> open_rows(const std::string& path, const std::string& digest);

// Replaces the file.
void write_rows(FileSystem& files, const std::string& path, const MakeRows& make);

}  // namespace annulus
