// Dataset: the rows of a run. It mixes the sources of [data] train, follows the stages of data.context, and does not
// depend on ranks: row r of step s is the same for every caller. Used by runtime/training/, `annulus pack` and
// benchmarks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/pattern/rollouts.h"
#include "attention/pattern/span.h"
#include "runtime/config/config.h"
#include "runtime/data/mixture.h"
#include "runtime/data/order.h"
#include "runtime/data/packing.h"
#include "runtime/data/read_row.h"
#include "runtime/data/row_index.h"
#include "runtime/data/shards/corpus.h"

namespace annulus {

// What a source has contributed.
struct SourceUse {
  int64_t rows = 0;
  int64_t targets = 0;    // positions that are not padding or repeated, including those whose target does not count
  int64_t documents = 0;  // what rows hold of documents or trees: one that is cut counts once for each of its rows

  // Adds another use, or takes it off with `times` = -1.
  void add(const SourceUse& other, int64_t times = 1);
  friend bool operator==(const SourceUse&, const SourceUse&) = default;
};

// A row before its tokens are read: where they lie, and what it holds of documents.
struct DrawnRow {
  size_t source = 0;
  int64_t context = 0;        // the number of its positions
  std::vector<Piece> pieces;  // in order, one for each document that it has tokens of, or branch of a tree; the rest of
                              // it is padding

  // Returns its parts in order: the documents or nodes of trees, whatever data.documents is, and then padding if there
  // is any (row_parts in tree_packing.h).
  RowParts parts() const;
  // Returns what it takes from its source.
  SourceUse use() const;
};

// Thread-safe except for resume() and leave_out(), which find or make row indexes as the constructor does.
class Dataset {
 public:
  // Opens every source and finds or makes its row indexes for all stages, in memory for texts and on disk for token
  // shards. `vocab`: that of the model; 0: any. `resumes`: there are no rows until resume() has been called. Raises
  // Error(kInput) as Corpus, RowIndex and require_settings do; for ids or a tokenizer that do not fit the model or each
  // other; and if a source has fewer tokens than a row of "stream" needs.
  Dataset(const DataConfig& data, int64_t seed, int64_t vocab = 0, bool resumes = false);
  ~Dataset();

  // ---- training: step s has rows 0, 1, ..., as many as batch * accumulate of its stage

  int64_t context(int64_t step) const { return phase_of(step).context; }
  int64_t rows(int64_t step) const { return phase_of(step).rows; }
  // Looks up a row. Reads no tokens. Raises Error(kInput) if the file of the row index has changed or is damaged.
  DrawnRow drawn(int64_t step, int64_t row) const;
  // What the rows of this step take from each source.
  std::vector<SourceUse> uses(int64_t step) const;
  // The epochs of a source that the steps before this one have completed, and the share of the epoch that they began:
  // 1.25.
  double epochs(size_t source, int64_t step) const;

  // Leaves out the rows that this step would draw: it takes those that follow, and so do the steps after it. Packs the
  // rest of epochs again if a later stage has rows of another length. Must not be called while rows are read.
  void leave_out(int64_t step);
  // The number of rows that leave_out() has left out, over all steps.
  int64_t rows_left_out() const;

  // ---- validation: documents that are held out, in rows as long as those of `step`

  bool has_validation() const;
  // The number of validation rows of a source; 0 if nothing is held out.
  int64_t validation_rows(size_t source, int64_t step) const;
  // Returns row i of `count` rows that are spaced evenly over them. If there are fewer than `count`, the further rows
  // are nothing but padding.
  DrawnRow held_out(size_t source, int64_t step, int64_t i, int64_t count) const;

  // ---- tokens

  // read_row() of a row's source: tokens, targets and, unless it is null, the targets' weights at some positions.
  void read(const DrawnRow& row, const std::vector<Span>& positions, int64_t* tokens, int64_t* targets,
            float* weights = nullptr) const;
  // Whether some target has a weight other than 0 and 1.
  bool weighs_targets() const;
  // Whether a source holds prefix trees.
  bool has_trees() const;
  // Returns the number of tokens that the files have returned so far.
  int64_t tokens_read() const;

  // ---- descriptions

  size_t sources() const { return sources_.size(); }
  std::string name(size_t source) const { return data_.train.name(source); }
  int64_t vocab() const { return vocab_; }  // as given
  // Whether all sources are texts, whose tokens are bytes.
  bool is_text() const;
  // The folder of the shards that has tokens.table, the texts of all ids; empty: there is none.
  std::string tokenizer_folder() const;
  // The digest of the tokenizer that made the shards; empty: the shards do not say.
  const std::string& tokenizer() const { return tokenizer_; }
  // A checksum of corpora and settings, which ranks compare.
  std::string fingerprint() const;
  // "2,141 files, 41,335,867 bytes (2,066,794 for validation)"; sources are separated by "; ".
  std::string text() const;
  // Messages about what a user may not have meant, a line each.
  std::vector<std::string> warnings() const;

  // Raises Error(kInput) if the corpus, the source `name`, holds prefix trees, and the settings would cut them or mix
  // them with what else is in their rows.
  static void require_settings(const DataConfig& data, const Corpus& corpus, const std::string& name);
  // How the configuration packs rows of this length, and the folder of their index, which is empty for texts because
  // their index is in memory.
  static PackSettings pack_settings(const DataConfig& data, int64_t context);
  static std::string index_folder(const DataConfig& data, const Corpus& corpus);

  // ---- resuming

  // JSON for a checkpoint after `step` steps: what rows were drawn from and how, and what each source has contributed.
  std::string state(int64_t step, const std::vector<SourceUse>& uses) const;
  // Continues a run after `step` steps: rows that were drawn are not drawn again in their epoch, whatever has changed,
  // even the seed. Returns messages for the user. Raises Error(kInput) if `state` is invalid.
  std::vector<std::string> resume(const std::string& state, int64_t step);
  // The first step that has rows: 0, or that of resume().
  int64_t first_step() const { return first_step_; }
  // What each source had contributed before it.
  const std::vector<SourceUse>& resumed_uses() const { return resumed_uses_; }

 private:
  // Steps from `step` on whose rows come from the same sources in the same way.
  struct Phase {
    struct Source {
      std::string digest;
      double weight = 0;

      friend bool operator==(const Source&, const Source&) = default;
    };
    int64_t step = 0;
    int64_t context = 0;
    int64_t rows = 0;  // in a step
    PackSettings settings;
    std::vector<Source> sources;
    std::vector<int64_t> drawn;  // from each source of the phase, before it
    // Which blocks of `rows` draws are left out, numbered from 0 and rising. With rows = 4 and left_out = {2}, the
    // third step of the phase has draws 12 to 15 instead of 8 to 11.
    std::vector<int64_t> left_out;
    std::optional<Mixture> mixture;

    // The first draw of a step, counted from the beginning of the phase.
    int64_t first_draw(int64_t of) const;
    // How many of the phase's draws come before the end of the step before this one.
    int64_t draws_before(int64_t of) const { return of == step ? 0 : first_draw(of - 1) + rows; }

    bool continues(const Phase& before) const {
      return rows == before.rows && settings.text() == before.settings.text() && sources == before.sources;
    }
  };
  struct Source {
    std::unique_ptr<Corpus> corpus;
    std::string digest;  // of the corpus
    std::optional<SourceOrder> order;
  };

  void warn_of_marks(size_t source, std::vector<std::string>& warnings) const;
  std::shared_ptr<const RowIndex> index_of(size_t source, const PackSettings& settings) const;
  std::vector<Phase> planned(int64_t from) const;  // as configured, from that step on
  void follow(std::vector<Phase> phases);          // sets phases_ and makes the sources' orders
  const Phase& phase_of(int64_t step) const { return phases_[stage_at(phases_, step)]; }

  DataConfig data_;
  int64_t seed_;
  int64_t vocab_;
  std::vector<Source> sources_;
  std::string tokenizer_;  // the digest of the shards' tokenizer; empty for texts, and if no shard says it
  std::vector<Phase> phases_;
  int64_t first_step_ = 0;
  std::vector<SourceUse> resumed_uses_;
  std::map<std::string, std::pair<std::string, SourceUse>> gone_;  // by digest: name and use of sources that are gone
  mutable std::mutex indexes_mutex_;
  mutable std::map<std::pair<size_t, std::string>, std::shared_ptr<const RowIndex>> indexes_;  // by source and settings
};

}  // namespace annulus
