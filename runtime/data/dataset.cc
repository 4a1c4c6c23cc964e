// See dataset.h.
#include "runtime/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "runtime/data/shards/refuse.h"
#include "runtime/data/tree_packing.h"

namespace annulus {
namespace {

// The ids by which the documents of a file are found, for messages.
std::string ids_text(const TokenFile& file) {
  std::string text;
  if (file.begin_id()) text = "id " + std::to_string(*file.begin_id()) + " (begin)";
  if (file.end_id()) text += (text.empty() ? "id " : " or id ") + std::to_string(*file.end_id()) + " (end)";
  return text.empty() ? "begin or end id" : text;
}

}  // namespace

void SourceUse::add(const SourceUse& other, int64_t times) {
  rows += times * other.rows;
  targets += times * other.targets;
  documents += times * other.documents;
}

RowParts DrawnRow::parts() const { return row_parts(pieces, context); }

SourceUse DrawnRow::use() const {
  SourceUse use{.rows = 1, .targets = 0, .documents = 0};
  for (const Piece& piece : pieces) {
    use.targets += piece.repeated ? 0 : piece.count;
    use.documents += piece.after < 0 ? 1 : 0;
  }
  return use;
}

Dataset::Dataset(const DataConfig& data, int64_t seed, int64_t vocab, bool resumes)
    : data_(data), seed_(seed), vocab_(vocab) {
  const std::vector<SourceConfig>& configured = data_.train.list;
  for (size_t i = 0; i < configured.size(); ++i) {
    auto corpus = std::make_unique<Corpus>(configured[i], data_.max_bytes);
    const std::string which = configured.size() == 1 ? "" : name(i) + ": ";
    if (i > 0 && corpus->is_text() != sources_[0].corpus->is_text()) {
      refuse_data(which + corpus->where(0) + " is " +
                  (corpus->is_text() ? "text, whose tokens are bytes" : "of a shard of tokens") + ", but the source " +
                  name(0) +
                  " is not: the same id would mean different things; make shards of the text (annulus tokenize)");
    }
    if (data_.max_bytes > 0 && !corpus->is_text()) {
      refuse_data(which + "data.max_bytes is for texts, but " + corpus->where(0) +
                  " is a shard of tokens: leave it at 0");
    }
    require_settings(data_, *corpus, name(i));
    // If the shards give no bound, each row is checked when it is read.
    const int64_t needed = corpus->is_text() ? 256 : corpus->vocab().value_or(0);
    if (vocab_ > 0 && needed > vocab_) {
      refuse_data(which + "the ids of " + (corpus->is_text() ? "a text, its bytes," : corpus->file(0).path()) +
                  " go up to " + std::to_string(needed - 1) + ", but model.vocab is " + std::to_string(vocab_) +
                  ": set model.vocab=" + std::to_string(needed) + " or more");
    }
    if (!corpus->tokenizer().empty()) {
      if (!tokenizer_.empty() && tokenizer_ != corpus->tokenizer()) {
        refuse_data(which + corpus->file(0).path() + " was made with the tokenizer " + corpus->tokenizer() +
                    ", but the sources before it with " + tokenizer_ + ": the same id stands for different texts");
      }
      tokenizer_ = corpus->tokenizer();
    }
    for (size_t j = 0; j < i; ++j) {
      if (sources_[j].digest == corpus->fingerprint()) {
        refuse_data("the sources " + name(j) + " and " + name(i) +
                    " hold the same tokens: give them one entry with a weight");
      }
    }
    const std::string digest = corpus->fingerprint();
    sources_.push_back({.corpus = std::move(corpus), .digest = digest, .order = std::nullopt});
  }
  resumed_uses_.resize(sources_.size());
  if (!resumes) follow(planned(0));
}

Dataset::~Dataset() = default;

bool Dataset::is_text() const {
  return std::all_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.corpus->is_text(); });
}

std::string Dataset::tokenizer_folder() const {
  for (const Source& source : sources_) {
    const std::string folder = source.corpus->folder();
    if (!source.corpus->is_text() && is_file(folder + "/tokens.table")) return folder;
  }
  return "";
}

std::string Dataset::fingerprint() const {
  std::string all;
  for (const Phase& phase : phases_) {
    all += std::to_string(phase.step) + " " + std::to_string(phase.rows) + " " + phase.settings.text();
    for (const Phase::Source& source : phase.sources) all += " " + source.digest + " " + exact(source.weight);
    for (const int64_t out : phase.left_out) all += " without " + std::to_string(out);
    all += "\n";
  }
  return checksum(all.data(), all.size());
}

std::string Dataset::text() const {
  std::string text;
  for (size_t i = 0; i < sources_.size(); ++i) {
    const RowIndex& index = *index_of(i, phases_.back().settings);
    const PartCounts& held = index.counts(Split::kValidation);
    text += (text.empty() ? "" : "; ") + (sources_.size() > 1 ? name(i) + ": " : "") + sources_[i].corpus->text() +
            " (" + with_commas(held.tokens) + " for validation)";
  }
  return text;
}

// Says in how many documents nothing counts, and in how many so late that a row ends before.
void Dataset::warn_of_marks(size_t source, std::vector<std::string>& warnings) const {
  const Corpus& corpus = *sources_[source].corpus;
  const PackSettings& settings = phases_.back().settings;
  const bool apart = settings.units_are_documents();
  struct Documents {
    int64_t count = 0, first = 0;  // where the first of them begins
    void add(int64_t begin) {
      if (count++ == 0) first = begin;
    }
  } all, without, late;
  corpus.visit_documents(false, [&](int64_t begin, int64_t length, uint64_t) {
    if (length == 0) return;
    all.add(begin);
    int64_t before = -1;  // tokens before the first that counts; nothing predicts the first token of a document alone
    const int64_t from = begin + (apart ? 1 : 0);
    corpus.visit_weights(from, begin + length - from, [&](int64_t at, int64_t, float weight) {
      if (weight > 0 && before < 0) before = at - begin;
    });
    if (before < 0) without.add(begin);
    // A rollout that a row cannot hold is refused.
    if (apart && !corpus.has_trees() && before > settings.context) late.add(begin);
  });
  const std::string of = "source " + name(source) + ": in ";
  if (without.count > 0) {
    warnings.push_back(of + with_commas(without.count) + " of " + with_commas(all.count, "document") +
                       " no token counts as a target, so they teach nothing; the first is at " +
                       corpus.where(without.first));
  }
  if (late.count > 0) {
    warnings.push_back(of + with_commas(late.count, "document") + " the prompt is longer than a row of " +
                       with_commas(settings.context, "token") +
                       ", so what counts is in rows that lack the beginning of its prompt (the first is at " +
                       corpus.where(late.first) + "): lengthen data.context, or shorten or leave out such documents");
  }
}

std::vector<std::string> Dataset::warnings() const {
  std::vector<std::string> warnings;
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i].corpus->marks_targets()) warn_of_marks(i, warnings);
  }
  const PackSettings& settings = phases_.back().settings;
  const bool documents_matter = settings.units_are_documents() || data_.positions == "restart";
  for (size_t i = 0; documents_matter && i < sources_.size(); ++i) {
    const Corpus& corpus = *sources_[i].corpus;
    if (corpus.is_text() || corpus.file(0).documents()) continue;  // each file is one document, or documents are stored
    const RowIndex& index = *index_of(i, settings);
    const int64_t documents = index.counts(Split::kTrain).documents + index.counts(Split::kValidation).documents;
    if (documents > corpus.files() + 1) continue;  // a tail that is held out is one more document
    warnings.push_back("source " + name(i) + " is read as " + with_commas(corpus.files(), "document") +
                       ", one for each file, because no " + ids_text(corpus.file(0)) +
                       " was found: say with which id its documents begin or end, { files = ..., end = ID }");
  }
  return warnings;
}

// ---- indexes

void Dataset::require_settings(const DataConfig& data, const Corpus& corpus, const std::string& name) {
  if (!corpus.has_trees()) return;
  std::vector<std::string> needed;
  if (data.packing == "stream") needed.emplace_back("data.packing = \"best-fit\" (or \"document\")");
  if (!data.documents) needed.emplace_back("data.documents = true");
  if (data.positions != "restart") needed.emplace_back("data.positions = \"restart\"");
  if (needed.empty()) return;
  refuse_data("the source " + name + " (" + corpus.file(0).path() +
              ") holds prefix trees, of which a token sees only those before it on its own path: set " +
              join(needed, " and "));
}

PackSettings Dataset::pack_settings(const DataConfig& data, int64_t context) {
  return {.context = context,
          .packing = packing_named(data.packing),
          .documents = data.documents,
          .validation_fraction = data.validation_fraction,
          .refuse_long = data.long_documents == "refuse"};
}

std::string Dataset::index_folder(const DataConfig& data, const Corpus& corpus) {
  if (corpus.is_text()) return "";
  return data.index.empty() ? corpus.folder() : data.index;
}

std::shared_ptr<const RowIndex> Dataset::index_of(size_t source, const PackSettings& settings) const {
  const std::lock_guard lock(indexes_mutex_);
  std::shared_ptr<const RowIndex>& index = indexes_[{source, settings.text()}];
  if (index) return index;
  const Corpus& corpus = *sources_[source].corpus;
  const std::string folder = index_folder(data_, corpus);
  try {
    index = folder.empty() ? RowIndex::make(corpus, settings) : RowIndex::find_or_make(corpus, settings, folder);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kResource || folder.empty()) throw;
    throw Error(error.kind(), error.module(),
                std::string(error.message()) + "; row indexes lie beside the shards unless data.index names a folder");
  }
  const PartCounts& counts = index->counts(Split::kTrain);
  const bool short_stream = settings.packing == Packing::kStream && counts.targets < settings.context;
  if (counts.rows == 0 || short_stream) {
    const std::string which = corpus.files() == 1 ? corpus.file(0).path() : with_commas(corpus.files(), "file");
    refuse_data("source " + name(source) + " (" + which + ", " +
                with_commas(corpus.tokens(), corpus.is_text() ? "byte" : "token") + ") has " +
                with_commas(counts.targets, "position") + " to train on, but a row needs " +
                with_commas(settings.context) +
                ": use more data, a shorter data.context, or a smaller data.validation_fraction");
  }
  return index;
}

// ---- phases

std::vector<Dataset::Phase> Dataset::planned(int64_t from) const {
  std::vector<Phase> phases;
  const std::vector<DataConfig::Stage> stages = data_.stages();
  for (size_t i = 0; i < stages.size(); ++i) {
    if (i + 1 < stages.size() && stages[i + 1].step <= from) continue;  // it has ended by then
    Phase phase;
    phase.step = std::max(from, stages[i].step);
    phase.context = stages[i].context;
    phase.rows = stages[i].rows();
    phase.settings = pack_settings(data_, phase.context);
    for (size_t s = 0; s < sources_.size(); ++s) {
      const double weight = data_.train.list[s].weight;
      const double size = weight > 0 ? weight : static_cast<double>(index_of(s, phase.settings)->rows(Split::kTrain));
      phase.sources.push_back({sources_[s].digest, size});
    }
    phases.push_back(std::move(phase));
  }
  return phases;
}

void Dataset::follow(std::vector<Phase> phases) {
  std::map<std::string, int64_t> drawn;  // by digest, of every source so far
  std::vector<PackSettings> settings(sources_.size());
  for (Source& source : sources_) source.order.reset();
  for (size_t i = 0; i < phases.size(); ++i) {
    Phase& phase = phases[i];
    std::vector<double> weights;
    phase.drawn.clear();
    for (const Phase::Source& source : phase.sources) {
      weights.push_back(source.weight);
      phase.drawn.push_back(drawn[source.digest]);
    }
    phase.mixture.emplace(std::move(weights));
    for (size_t s = 0; s < sources_.size(); ++s) {
      const auto is_this = [&](const Phase::Source& other) { return other.digest == sources_[s].digest; };
      if (std::none_of(phase.sources.begin(), phase.sources.end(), is_this)) continue;
      std::optional<SourceOrder>& order = sources_[s].order;
      if (!order) {
        order.emplace(seed_, sources_[s].digest, index_of(s, phase.settings));
      } else if (settings[s].text() != phase.settings.text()) {
        order->change(drawn[sources_[s].digest], index_of(s, phase.settings), index_folder(data_, *sources_[s].corpus));
      }
      settings[s] = phase.settings;
    }
    if (i + 1 == phases.size()) break;
    const std::vector<int64_t> counts = phase.mixture->counts(phase.draws_before(phases[i + 1].step));
    for (size_t s = 0; s < counts.size(); ++s) drawn[phase.sources[s].digest] += counts[s];
  }
  phases_ = std::move(phases);
}

int64_t Dataset::Phase::first_draw(int64_t of) const {
  int64_t place = of - step;
  for (const int64_t out : left_out) place += out <= place ? 1 : 0;
  return place * rows;
}

void Dataset::leave_out(int64_t step) {
  std::vector<Phase> phases = phases_;
  Phase& phase = phases[stage_at(phases, step)];
  const int64_t place = phase.first_draw(step) / phase.rows;
  phase.left_out.insert(std::upper_bound(phase.left_out.begin(), phase.left_out.end(), place), place);
  follow(std::move(phases));
}

int64_t Dataset::rows_left_out() const {
  int64_t rows = 0;
  for (const Phase& phase : phases_) rows += phase.rows * static_cast<int64_t>(phase.left_out.size());
  return rows;
}

// ---- rows

DrawnRow Dataset::drawn(int64_t step, int64_t row) const {
  const Phase& phase = phase_of(step);
  if (step < phase.step || row < 0 || row >= phase.rows) {
    throw Error(ErrorKind::kInternal, "data",
                "there is no row " + std::to_string(row) + " of step " + std::to_string(step));
  }
  const Mixture::Draw draw = phase.mixture->at(phase.first_draw(step) + row);
  for (size_t s = 0; s < sources_.size(); ++s) {
    if (sources_[s].digest != phase.sources[draw.source].digest) continue;
    const SourceOrder::Drawn at = sources_[s].order->at(phase.drawn[draw.source] + draw.number);
    return {.source = s, .context = phase.context, .pieces = at.index->row(Split::kTrain, at.row)};
  }
  throw Error(ErrorKind::kInternal, "data", "the source of a row of an earlier step is gone");
}

std::vector<SourceUse> Dataset::uses(int64_t step) const {
  std::vector<SourceUse> uses(sources_.size());
  for (int64_t row = 0; row < rows(step); ++row) {
    const DrawnRow at = drawn(step, row);
    uses[at.source].add(at.use());
  }
  return uses;
}

double Dataset::epochs(size_t source, int64_t step) const {
  const Phase& phase = phase_of(step);
  const std::vector<int64_t> counts = phase.mixture->counts(phase.draws_before(step));
  for (size_t s = 0; s < counts.size(); ++s) {
    if (phase.sources[s].digest == sources_[source].digest) {
      return sources_[source].order->epochs(phase.drawn[s] + counts[s]);
    }
  }
  return 0;
}

// ---- validation

bool Dataset::has_validation() const {
  for (size_t s = 0; s < sources_.size(); ++s) {
    if (index_of(s, phases_.back().settings)->rows(Split::kValidation) > 0) return true;
  }
  return false;
}

int64_t Dataset::validation_rows(size_t source, int64_t step) const {
  return index_of(source, phase_of(step).settings)->rows(Split::kValidation);
}

DrawnRow Dataset::held_out(size_t source, int64_t step, int64_t i, int64_t count) const {
  const Phase& phase = phase_of(step);
  const std::shared_ptr<const RowIndex> index = index_of(source, phase.settings);
  const int64_t rows = index->rows(Split::kValidation);
  const int64_t row = rows >= count ? static_cast<int64_t>(static_cast<__int128>(rows) * i / count) : i;
  return {.source = source,
          .context = phase.context,
          .pieces = row < rows ? index->row(Split::kValidation, row) : std::vector<Piece>()};
}

// ---- tokens

void Dataset::read(const DrawnRow& row, const std::vector<Span>& positions, int64_t* tokens, int64_t* targets,
                   float* weights) const {
  read_row(*sources_[row.source].corpus, row.pieces, positions, {vocab_, data_.ignore}, tokens, targets, weights);
}

bool Dataset::weighs_targets() const {
  return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.corpus->weighs_targets(); });
}

bool Dataset::has_trees() const {
  return std::any_of(sources_.begin(), sources_.end(), [](const Source& s) { return s.corpus->has_trees(); });
}

int64_t Dataset::tokens_read() const {
  return std::accumulate(sources_.begin(), sources_.end(), int64_t{0},
                         [](int64_t sum, const Source& source) { return sum + source.corpus->tokens_read(); });
}

}  // namespace annulus
