// EvaluationData: the rows on which `annulus evaluate --data` computes losses: files, or the held-out documents of a
// run. Used by evaluation.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/data/packing.h"
#include "runtime/data/read_row.h"
#include "runtime/data/row_index.h"
#include "runtime/data/shards/corpus.h"
#include "runtime/data/tree_packing.h"

namespace annulus {

// The sources and how rows are made of them (packing, documents, positions, ignore, ...). data.train has the sources.
// If one holds prefix trees, rows hold whole documents or trees, apart, with positions of their own, as it demands.
struct EvaluationDataSettings {
  DataConfig data;
  int64_t length = 0;     // tokens of a row
  bool held_out = false;  // the documents that data.validation_fraction holds out, not all
  int64_t rows = 0;       // the most rows of a source, spaced evenly over all; 0: all
  int64_t vocab = 0;      // of the model
};

// Thread-safe after construction.
class EvaluationData {
 public:
  // Opens every source and finds its rows; nothing is written. Raises Error(kInput) as Corpus and RowIndex do, if a
  // source has no row, and if the ids of a source do not fit the vocabulary or those of another source.
  explicit EvaluationData(const EvaluationDataSettings& settings);

  size_t sources() const { return sources_.size(); }
  std::string name(size_t source) const { return settings_.data.train.name(source); }
  const Corpus& corpus(size_t source) const { return *sources_[source].corpus; }
  int64_t rows(size_t source) const;

  // Returns the pieces of row i, each of one document or branch of a tree; the rest of the row is padding.
  std::vector<Piece> row(size_t source, int64_t i) const;
  // Returns the parts of a row: its pieces, or the nodes of their trees, and then padding if there is any.
  RowParts parts(const std::vector<Piece>& pieces) const { return row_parts(pieces, settings_.length); }
  // Reads the whole row: `length` tokens and as many targets and, unless it is null, weights (read_row.h).
  void read(size_t source, const std::vector<Piece>& pieces, int64_t* tokens, int64_t* targets, float* weights) const;
  // Returns the number of the document that holds a token, from 0 in the order of the source.
  int64_t document_of(size_t source, int64_t token) const;

  bool documents_apart() const { return settings_.data.documents; }
  bool positions_restart() const { return settings_.data.positions == "restart"; }
  int64_t length() const { return settings_.length; }
  bool is_text() const { return sources_.at(0).corpus->is_text(); }
  // A checksum of sources and settings, which ranks compare.
  std::string fingerprint() const;

 private:
  struct Source {
    std::unique_ptr<Corpus> corpus;
    std::shared_ptr<const RowIndex> index;
    std::vector<int64_t> documents;  // where each begins
  };

  int64_t all_rows(size_t source) const { return sources_[source].index->rows(split_); }

  EvaluationDataSettings settings_;
  Split split_;
  TokenRules rules_;
  std::vector<Source> sources_;
};

}  // namespace annulus
