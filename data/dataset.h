// Dataset: the rows of a run. It mixes the sources of [data] train, follows the stages of data.context, and knows no
// ranks: row r of step s is the same for whoever asks. Used by training/.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "data/mixture.h"
#include "data/order.h"
#include "data/row_index.h"
#include "data/shards/corpus.h"

namespace annulus {

// Of a target that does not count: of padding, and ids of data.ignore.
inline constexpr int64_t kNoTarget = -1;

// One row of as many tokens as the stage's context.
struct Row {
  std::vector<int64_t> tokens;   // of padding, 0
  std::vector<int64_t> targets;  // of each of them, what follows it, or kNoTarget
};

// What a source has given.
struct SourceUse {
  int64_t rows = 0;
  int64_t targets = 0;    // positions that are no padding; ids of data.ignore are among them
  int64_t documents = 0;  // parts that rows are made of: a document that is cut counts once for each of its rows

  friend bool operator==(const SourceUse&, const SourceUse&) = default;
};

// Thread-safe but for resume() and leave_out(), which find or make row indexes as the constructor does.
class Dataset {
 public:
  // Opens every source and finds or makes its row indexes, of all stages: of texts in memory, of token shards on disk.
  // `vocab`: of the model; 0: any. Raises Error(kInput) as Corpus and RowIndex do; for ids or a tokenizer that do not
  // fit the model or each other; where a source has fewer tokens than a row of "stream" needs.
  // `resumes`: there are no rows before resume() has been called.
  Dataset(const DataConfig& data, int64_t seed, int64_t vocab = 0, bool resumes = false);
  ~Dataset();

  // ---- training: rows 0, 1, ... of step 0, 1, ...: batch * accumulate of the stage of that step.

  int64_t context(int64_t step) const { return phase_of(step).context; }
  int64_t rows(int64_t step) const { return phase_of(step).rows; }
  size_t source(int64_t step, int64_t row) const;
  // Raises Error(kInput) where a file has changed, cannot be read, or holds an id that is not below the vocabulary.
  Row row(int64_t step, int64_t row) const;
  // The lengths of the parts of a row in their order, padding last; they add up to context(step). Reads no tokens.
  std::vector<int64_t> parts(int64_t step, int64_t row) const;
  // What the rows of this step take from each source.
  std::vector<SourceUse> uses(int64_t step) const;
  // Epochs of a source that the steps before this one have completed, with the share of the one that they began.
  double epochs(size_t source, int64_t step) const;

  // The rows of this step are drawn for no step: it takes those that follow, and so do the steps behind it. Packs anew
  // what is left of epochs where a later stage has rows of another length. Not while rows are read.
  void leave_out(int64_t step);
  // Rows that were left out so, of all steps.
  int64_t rows_left_out() const;

  // ---- validation: rows of documents that are held out, in rows as long as those of `step`.

  bool has_validation() const;
  // Rows of a source that there are at most; 0 where nothing is held out.
  int64_t validation_rows(size_t source, int64_t step) const;
  // Row i of `count` that are evenly spaced over them; without tokens beyond validation_rows(): no target counts.
  Row validation_row(size_t source, int64_t step, int64_t i, int64_t count) const;
  std::vector<int64_t> validation_parts(size_t source, int64_t step, int64_t i, int64_t count) const;

  // ---- what it is

  size_t sources() const { return sources_.size(); }
  std::string name(size_t source) const { return data_.train.name(source); }
  // All sources are texts: a token is a byte.
  bool is_text() const;
  // The folder of shards in which its table of ids and texts lies, tokens.table; empty: there is none.
  std::string tokenizer_folder() const;
  // The digest of the tokenizer that made the shards; empty: they do not say.
  const std::string& tokenizer() const { return tokenizer_; }
  // Of corpora and settings: ranks compare it.
  std::string fingerprint() const;
  // "2,141 files, 41,335,867 bytes (2,066,794 for validation)", of several sources one after the other.
  std::string text() const;
  // What a user may not have meant, a line each.
  std::vector<std::string> warnings() const;

  // How rows of this length are packed by the configuration, and in which folder their index lies: empty for texts,
  // whose index is in memory.
  static PackSettings pack_settings(const DataConfig& data, int64_t context);
  static std::string index_folder(const DataConfig& data, const Corpus& corpus);

  // ---- across a resume

  // For a checkpoint after `step` steps: JSON, of what rows were drawn from and how, and of what each source has given.
  std::string state(int64_t step, const std::vector<SourceUse>& uses) const;
  // Of a run that goes on after `step` steps: rows that were drawn are not drawn again in their epoch, whatever has
  // changed, the seed included. Returns what there is to tell. Raises Error(kInput) for a state that is none.
  std::vector<std::string> resume(const std::string& state, int64_t step);
  // The first step that rows are asked for: 0, or that of resume().
  int64_t first_step() const { return first_step_; }
  // What each source had given before it.
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
    int64_t rows = 0;  // of a step
    PackSettings settings;
    std::vector<Source> sources;
    std::vector<int64_t> drawn;     // of each source of the phase, before it
    std::vector<int64_t> left_out;  // which rows are, in steps as if none were, from 0; rising
    std::optional<Mixture> mixture;

    // Where the rows of a step begin among the draws of the phase.
    int64_t first_draw(int64_t of) const;
    // How many of those the steps before this one have behind them.
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
  struct Place {
    size_t source;
    SourceOrder::Drawn drawn;
  };

  std::shared_ptr<const RowIndex> index_of(size_t source, const PackSettings& settings) const;
  std::vector<Phase> planned(int64_t from) const;  // by the configuration, from that step on
  void follow(std::vector<Phase> phases);          // makes the sources' orders
  size_t number_of_phase(int64_t step) const;
  const Phase& phase_of(int64_t step) const { return phases_[number_of_phase(step)]; }
  Place place(int64_t step, int64_t row) const;
  std::vector<Piece> validation_pieces(size_t source, int64_t step, int64_t i, int64_t count) const;
  Row assemble(size_t source, const std::vector<Piece>& pieces, int64_t context) const;

  DataConfig data_;
  int64_t seed_;
  int64_t vocab_;
  std::vector<Source> sources_;
  std::string tokenizer_;  // the digest of the shards'; empty for texts, and where none says one
  std::vector<Phase> phases_;
  int64_t first_step_ = 0;
  std::vector<SourceUse> resumed_uses_;
  std::map<std::string, std::pair<std::string, SourceUse>> gone_;  // by digest: name and use of earlier sources
  mutable std::mutex indexes_mutex_;
  mutable std::map<std::pair<size_t, std::string>, std::shared_ptr<const RowIndex>> indexes_;  // by source and settings
};

}  // namespace annulus
