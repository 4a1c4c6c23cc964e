// See dataset.h.
#include "data/dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

using nlohmann::json;

constexpr int kStateVersion = 1;
constexpr int64_t kLongest = int64_t{1} << 40;  // tokens in a row

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kInput, "data", message); }

Packing packing_of(const DataConfig& data) {
  for (const Packing packing : {Packing::kStream, Packing::kBestFit, Packing::kDocument}) {
    if (packing_name(packing) == data.packing) return packing;
  }
  throw Error(ErrorKind::kInternal, "data", "data.packing was not checked");
}

std::vector<int64_t> lengths(const std::vector<Piece>& pieces, int64_t context) {
  std::vector<int64_t> lengths;
  int64_t left = context;
  for (const Piece& piece : pieces) {
    lengths.push_back(piece.count);
    left -= piece.count;
  }
  if (left > 0) lengths.push_back(left);
  return lengths;
}

json to_json(const PackSettings& s) {
  return {{"packing", packing_name(s.packing)},
          {"documents", s.documents},
          {"validation_fraction", s.validation_fraction},
          {"refuse_long", s.refuse_long}};
}

PackSettings settings_from(const json& from, int64_t context) {
  DataConfig data;
  data.packing = from.at("packing").get<std::string>();
  return {.context = context,
          .packing = packing_of(data),
          .documents = from.at("documents").get<bool>(),
          .validation_fraction = from.at("validation_fraction").get<double>(),
          .refuse_long = from.at("refuse_long").get<bool>()};
}

}  // namespace

Dataset::Dataset(const DataConfig& data, int64_t seed, int64_t vocab, bool resumes)
    : data_(data), seed_(seed), vocab_(vocab) {
  const std::vector<SourceConfig>& configured = data_.train.list;
  for (size_t i = 0; i < configured.size(); ++i) {
    auto corpus = std::make_unique<Corpus>(configured[i], data_.max_bytes);
    const std::string which = configured.size() == 1 ? "" : name(i) + ": ";
    if (i > 0 && corpus->is_text() != sources_[0].corpus->is_text()) {
      refuse(which + corpus->where(0) + " is " +
             (corpus->is_text() ? "text, whose tokens are bytes" : "of a shard of tokens") + ", but the source " +
             name(0) +
             " is not: the same id would mean different things; make shards of the text "
             "(annulus tokenize)");
    }
    if (data_.max_bytes > 0 && !corpus->is_text()) {
      refuse(which + "data.max_bytes is for texts, but " + corpus->where(0) + " is a shard of tokens: leave it at 0");
    }
    // Where the shards say no bound, each row is looked at when it is read.
    const int64_t needed = corpus->is_text() ? 256 : corpus->vocab().value_or(0);
    if (vocab_ > 0 && needed > vocab_) {
      refuse(which + "the ids of " + (corpus->is_text() ? "a text, its bytes," : corpus->file(0).path()) +
             " go up to " + std::to_string(needed - 1) + ", but model.vocab is " + std::to_string(vocab_) +
             ": set model.vocab=" + std::to_string(needed) + " or more");
    }
    if (!corpus->tokenizer().empty()) {
      if (!tokenizer_.empty() && tokenizer_ != corpus->tokenizer()) {
        refuse(which + corpus->file(0).path() + " was made with the tokenizer " + corpus->tokenizer() +
               ", the sources before with " + tokenizer_ + ": the same id means different text to them");
      }
      tokenizer_ = corpus->tokenizer();
    }
    for (size_t j = 0; j < i; ++j) {
      if (sources_[j].digest == corpus->fingerprint()) {
        refuse("the sources " + name(j) + " and " + name(i) +
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
    std::error_code error;
    const std::string folder = source.corpus->folder();
    if (!source.corpus->is_text() && std::filesystem::is_regular_file(folder + "/tokens.table", error)) return folder;
  }
  return "";
}

std::string Dataset::fingerprint() const {
  std::string all;
  for (const Phase& phase : phases_) {
    all += std::to_string(phase.step) + " " + std::to_string(phase.rows) + " " + phase.settings.text();
    for (const Phase::Source& source : phase.sources) all += " " + source.digest + " " + exact(source.weight);
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

// ---- indexes

PackSettings Dataset::pack_settings(const DataConfig& data, int64_t context) {
  return {.context = context,
          .packing = packing_of(data),
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
  index = folder.empty() ? RowIndex::make(corpus, settings) : RowIndex::find_or_make(corpus, settings, folder);
  const PartCounts& counts = index->counts(Split::kTrain);
  const bool short_stream = settings.packing == Packing::kStream && counts.targets < settings.context;
  if (counts.rows == 0 || short_stream) {
    const std::string unit = corpus.is_text() ? " bytes" : " tokens";
    const std::string which = corpus.files() == 1 ? corpus.file(0).path() : with_commas(corpus.files()) + " files";
    refuse("source " + name(source) + " (" + which + ", " + with_commas(corpus.tokens()) + unit + ") has " +
           with_commas(counts.targets) + " positions to train on, a row needs " + with_commas(settings.context) +
           ": use more data, a shorter data.context, or a smaller data.validation_fraction");
  }
  return index;
}

// ---- phases

std::vector<Dataset::Phase> Dataset::planned(int64_t from) const {
  std::vector<Phase> phases;
  const std::vector<ContextSchedule::Stage>& stages = data_.context.stages;
  for (size_t i = data_.context.stage_of(from); i < stages.size(); ++i) {
    Phase phase;
    phase.step = std::max(from, stages[i].step);
    phase.context = stages[i].context;
    phase.rows = data_.batch_of(stages[i]) * data_.accumulate;
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
  std::map<std::string, int64_t> drawn;  // of every source there was
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
      } else if (settings[s] != phase.settings) {
        order->change(drawn[sources_[s].digest], index_of(s, phase.settings), index_folder(data_, *sources_[s].corpus));
      }
      settings[s] = phase.settings;
    }
    if (i + 1 == phases.size()) break;
    const std::vector<int64_t> counts = phase.mixture->counts((phases[i + 1].step - phase.step) * phase.rows);
    for (size_t s = 0; s < counts.size(); ++s) drawn[phase.sources[s].digest] += counts[s];
  }
  phases_ = std::move(phases);
}

const Dataset::Phase& Dataset::phase_of(int64_t step) const {
  size_t at = 0;
  while (at + 1 < phases_.size() && phases_[at + 1].step <= step) ++at;
  return phases_[at];
}

// ---- rows

Dataset::Place Dataset::place(int64_t step, int64_t row) const {
  const Phase& phase = phase_of(step);
  if (step < phase.step || row < 0 || row >= phase.rows) {
    throw Error(ErrorKind::kInternal, "data",
                "there is no row " + std::to_string(row) + " of step " + std::to_string(step));
  }
  const Mixture::Draw draw = phase.mixture->at((step - phase.step) * phase.rows + row);
  for (size_t s = 0; s < sources_.size(); ++s) {
    if (sources_[s].digest != phase.sources[draw.source].digest) continue;
    return {s, sources_[s].order->at(phase.drawn[draw.source] + draw.number)};
  }
  throw Error(ErrorKind::kInternal, "data", "the source of a row of an earlier step is gone");
}

size_t Dataset::source(int64_t step, int64_t row) const { return place(step, row).source; }

Row Dataset::assemble(size_t source, const std::vector<Piece>& pieces, int64_t context) const {
  const Corpus& corpus = *sources_[source].corpus;
  Row row{.tokens = std::vector<int64_t>(static_cast<size_t>(context), 0),
          .targets = std::vector<int64_t>(static_cast<size_t>(context), kNoTarget)};
  std::vector<int64_t> read;
  auto token = row.tokens.begin();
  auto target = row.targets.begin();
  for (const Piece& piece : pieces) {
    read.resize(static_cast<size_t>(piece.count) + 1);
    corpus.read(piece.token, piece.count + 1, read.data());
    if (vocab_ > 0) {
      const auto beyond = std::find_if(read.begin(), read.end(), [&](int64_t id) { return id < 0 || id >= vocab_; });
      if (beyond != read.end()) {
        refuse(corpus.where(piece.token + (beyond - read.begin())) + " is the id " + std::to_string(*beyond) +
               ", beyond model.vocab = " + std::to_string(vocab_) +
               ": is the file of this tokenizer, of this format and width?");
      }
    }
    token = std::copy(read.begin(), read.end() - 1, token);
    target = std::copy(read.begin() + 1, read.end(), target);
  }
  for (const int64_t ignored : data_.ignore) std::replace(row.targets.begin(), target, ignored, kNoTarget);
  return row;
}

Row Dataset::row(int64_t step, int64_t row) const {
  const Place at = place(step, row);
  return assemble(at.source, at.drawn.index->row(Split::kTrain, at.drawn.row), context(step));
}

std::vector<int64_t> Dataset::parts(int64_t step, int64_t row) const {
  const Place at = place(step, row);
  return lengths(at.drawn.index->row(Split::kTrain, at.drawn.row), context(step));
}

std::vector<SourceUse> Dataset::uses(int64_t step) const {
  std::vector<SourceUse> uses(sources_.size());
  for (int64_t row = 0; row < rows(step); ++row) {
    const Place at = place(step, row);
    SourceUse& use = uses[at.source];
    ++use.rows;
    for (const Piece& piece : at.drawn.index->row(Split::kTrain, at.drawn.row)) {
      use.targets += piece.count;
      ++use.documents;
    }
  }
  return uses;
}

double Dataset::epochs(size_t source, int64_t step) const {
  const Phase& phase = phase_of(step);
  const std::vector<int64_t> counts = phase.mixture->counts((step - phase.step) * phase.rows);
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

std::vector<Piece> Dataset::validation_pieces(size_t source, int64_t step, int64_t i, int64_t count) const {
  const std::shared_ptr<const RowIndex> index = index_of(source, phase_of(step).settings);
  const int64_t rows = index->rows(Split::kValidation);
  if (rows >= count) {
    return index->row(Split::kValidation, static_cast<int64_t>(static_cast<__int128>(rows) * i / count));
  }
  return i < rows ? index->row(Split::kValidation, i) : std::vector<Piece>();
}

Row Dataset::validation_row(size_t source, int64_t step, int64_t i, int64_t count) const {
  return assemble(source, validation_pieces(source, step, i, count), context(step));
}

std::vector<int64_t> Dataset::validation_parts(size_t source, int64_t step, int64_t i, int64_t count) const {
  return lengths(validation_pieces(source, step, i, count), context(step));
}

// ---- across a resume

std::string Dataset::state(int64_t step, const std::vector<SourceUse>& uses) const {
  json phases = json::array();
  for (const Phase& phase : phases_) {
    if (phase.step >= step) continue;  // nothing has been drawn from it
    json sources = json::array();
    for (const Phase::Source& source : phase.sources) {
      sources.push_back({{"digest", source.digest}, {"weight", source.weight}});
    }
    phases.push_back({{"step", phase.step},
                      {"context", phase.context},
                      {"rows", phase.rows},
                      {"settings", to_json(phase.settings)},
                      {"sources", std::move(sources)}});
  }
  json sources = json::object();
  for (size_t s = 0; s < sources_.size(); ++s) {
    sources[sources_[s].digest] = {
        {"name", name(s)}, {"rows", uses[s].rows}, {"targets", uses[s].targets}, {"documents", uses[s].documents}};
  }
  return json{{"version", kStateVersion},
              {"phases", std::move(phases)},
              {"sources", std::move(sources)},
              {"tokenizer", tokenizer_},
              {"seed", seed_}}
      .dump();
}

std::vector<std::string> Dataset::resume(const std::string& state, int64_t step) {
  std::vector<Phase> phases;
  if (state.empty()) {
    follow(planned(step));
    first_step_ = step;
    return {"the data: this run drew its rows at random, some of them more than once; from step " +
            with_commas(step + 1) + " on every row of an epoch is drawn once"};
  }
  std::map<std::string, std::string> names;
  std::vector<SourceUse> uses(sources_.size());
  std::string tokenizer;
  int64_t seed = seed_;
  try {
    const json from = json::parse(state);
    if (from.at("version").get<int>() != kStateVersion) refuse("it was written by a later version of annulus");
    tokenizer = from.at("tokenizer").get<std::string>();
    seed = from.at("seed").get<int64_t>();
    for (const auto& [digest, source] : from.at("sources").items()) {
      names[digest] = source.at("name").get<std::string>();
      for (size_t s = 0; s < sources_.size(); ++s) {
        if (sources_[s].digest != digest) continue;
        uses[s] = {source.at("rows").get<int64_t>(), source.at("targets").get<int64_t>(),
                   source.at("documents").get<int64_t>()};
      }
    }
    for (const json& saved : from.at("phases")) {
      Phase phase;
      phase.step = saved.at("step").get<int64_t>();
      phase.context = saved.at("context").get<int64_t>();
      phase.rows = saved.at("rows").get<int64_t>();
      phase.settings = settings_from(saved.at("settings"), phase.context);
      for (const json& source : saved.at("sources")) {
        phase.sources.push_back({source.at("digest").get<std::string>(), source.at("weight").get<double>()});
      }
      const bool rises = phase.step > (phases.empty() ? -1 : phases.back().step);
      const bool weighs = !phase.sources.empty() &&
                          std::all_of(phase.sources.begin(), phase.sources.end(),
                                      [](const Phase::Source& s) { return s.weight > 0 && std::isfinite(s.weight); });
      const bool small = phase.context >= 1 && phase.context <= kLongest && phase.rows >= 1 &&
                         phase.rows <= (int64_t{1} << 62) / std::max<int64_t>(1, step);
      if (!rises || !weighs || !small || phase.step >= step) refuse("it makes no sense");
      phases.push_back(std::move(phase));
    }
    if (phases.empty()) refuse("it names no rows that were drawn");
  } catch (const json::exception& error) {
    refuse("the checkpoint's record of the data is damaged: " + std::string(error.what()));
  } catch (const Error& error) {
    refuse("the checkpoint's record of the data is damaged: " + std::string(error.message()));
  }
  if (!tokenizer.empty() && !tokenizer_.empty() && tokenizer != tokenizer_) {
    refuse("the run was trained on tokens of the tokenizer " + tokenizer + ", but the shards are of " + tokenizer_ +
           ": its weights mean nothing with other ids");
  }
  std::vector<Phase> ahead = planned(step);
  std::vector<std::string> told;
  if (seed != seed_) {
    told.push_back("the data: the order of rows stays that of run.seed = " + std::to_string(seed) +
                   ", so that no row of an epoch is drawn twice");
    seed_ = seed;
  }
  const Phase& was = phases.back();
  const Phase& is = ahead.front();
  // A stage of data.context that begins here is no change.
  if (!planned(step - 1).front().continues(was)) {
    const std::string from = "from step " + with_commas(step + 1) + " on ";
    if (is.settings != was.settings) {
      told.push_back("the data: " + from + "rows are packed as " + is.settings.text() + " (they were " +
                     was.settings.text() + "): " +
                     (is.settings.units_are_documents() == was.settings.units_are_documents()
                          ? "what is left of each source's epoch is packed anew"
                          : "documents are told apart in one of the two alone, so each source begins its next epoch"));
    }
    if (is.settings.validation_fraction > was.settings.validation_fraction) {
      told.push_back(
          "the data: documents that are held out for validation from here on may have been trained on, and in what is "
          "left of the epoch they still are");
    }
    const auto name_of = [&](const std::string& digest) {
      const auto found = names.find(digest);
      return found == names.end() ? digest : found->second;
    };
    const auto find = [](const std::vector<Phase::Source>& in, const std::string& digest) {
      return std::find_if(in.begin(), in.end(), [&](const Phase::Source& s) { return s.digest == digest; });
    };
    for (const Phase::Source& source : was.sources) {
      if (find(is.sources, source.digest) != is.sources.end()) continue;
      told.push_back("the data: source " + name_of(source.digest) + " is not there as it was: " + from +
                     "no rows come from it");
    }
    const auto sum = [](const std::vector<Phase::Source>& of) {
      return std::accumulate(of.begin(), of.end(), 0.0,
                             [](double total, const Phase::Source& s) { return total + s.weight; });
    };
    for (size_t s = 0; s < is.sources.size(); ++s) {
      const auto before = find(was.sources, is.sources[s].digest);
      const bool seen = std::any_of(phases.begin(), phases.end(), [&](const Phase& phase) {
        return find(phase.sources, is.sources[s].digest) != phase.sources.end();
      });
      const double share = is.sources[s].weight / sum(is.sources);
      const double share_was = before == was.sources.end() ? 0 : before->weight / sum(was.sources);
      if (!seen) {
        told.push_back("the data: source " + name(s) + " has not been trained on: " + from + "its first epoch begins");
      } else if (std::abs(share - share_was) > 1e-3) {
        told.push_back("the data: " + from + "source " + name(s) + " gives " + exact(std::round(share * 1000) / 10) +
                       " % of the rows (it gave " + exact(std::round(share_was * 1000) / 10) + " %)");
      }
    }
  }
  if (is.continues(was)) ahead.erase(ahead.begin());
  phases.insert(phases.end(), std::make_move_iterator(ahead.begin()), std::make_move_iterator(ahead.end()));
  follow(std::move(phases));
  first_step_ = step;
  resumed_uses_ = std::move(uses);
  return told;
}

}  // namespace annulus
