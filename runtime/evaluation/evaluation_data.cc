// See evaluation_data.h.
#include "runtime/evaluation/evaluation_data.h"

#include <algorithm>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/data/dataset.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_source(const std::string& name, const std::string& message) {
  throw Error(ErrorKind::kInput, "evaluate", name + ": " + message);
}

}  // namespace

EvaluationData::EvaluationData(const EvaluationDataSettings& settings)
    : settings_(settings),
      split_(settings.held_out ? Split::kValidation : Split::kTrain),
      rules_{settings.vocab, settings.data.ignore} {
  for (const SourceConfig& source : settings_.data.train.list) {
    sources_.push_back({std::make_unique<Corpus>(source, settings_.data.max_bytes), nullptr, {}});
    if (!sources_.back().corpus->has_trees()) continue;
    // Trees are whole, and a token sees only its path, whatever the rows of the training were.
    if (settings_.data.packing == "stream") settings_.data.packing = "best-fit";
    settings_.data.documents = true;
    settings_.data.positions = "restart";
  }
  PackSettings pack = Dataset::pack_settings(settings_.data, settings_.length);
  if (!settings_.held_out) pack.validation_fraction = 0;
  for (size_t i = 0; i < sources_.size(); ++i) {
    Source& source = sources_[i];
    const Corpus& corpus = *source.corpus;
    if (i > 0 && corpus.is_text() != sources_[0].corpus->is_text()) {
      refuse_source(name(i), std::string("its tokens are ") + (corpus.is_text() ? "bytes" : "ids of a tokenizer") +
                                 ", but those of " + name(0) + " are not: evaluate them one after the other");
    }
    const int64_t needed = corpus.is_text() ? 256 : corpus.vocab().value_or(0);
    if (needed > settings_.vocab) {
      refuse_source(name(i), "its ids go up to " + std::to_string(needed - 1) + ", but the model's vocabulary has " +
                                 std::to_string(settings_.vocab) + ": it was trained on other tokens" +
                                 (corpus.is_text() ? " than bytes; annulus tokenize makes its shards" : ""));
    }
    source.index = RowIndex::make(corpus, pack);
    if (source.index->rows(split_) == 0) {
      refuse_source(name(i), settings_.held_out ? "no document is held out (data.validation_fraction is " +
                                                      exact(settings_.data.validation_fraction) + ")"
                                                : "there are not two tokens in a row, so there is nothing to predict");
    }
    corpus.visit_documents(/*hashed=*/false, [&](int64_t begin, int64_t length, uint64_t /*hash*/) {
      if (length > 0) source.documents.push_back(begin);
    });
  }
}

int64_t EvaluationData::rows(size_t source) const {
  const int64_t all = all_rows(source);
  return settings_.rows > 0 ? std::min(all, settings_.rows) : all;
}

std::vector<Piece> EvaluationData::row(size_t source, int64_t i) const {
  const auto spread = static_cast<int64_t>(static_cast<__int128>(all_rows(source)) * i / rows(source));
  return sources_[source].index->row(split_, spread);
}

void EvaluationData::read(size_t source, const std::vector<Piece>& pieces, int64_t* tokens, int64_t* targets,
                          float* weights) const {
  read_row(*sources_[source].corpus, pieces, {Span{0, 1, settings_.length}}, rules_, tokens, targets, weights);
}

int64_t EvaluationData::document_of(size_t source, int64_t token) const {
  const std::vector<int64_t>& begins = sources_[source].documents;
  return std::upper_bound(begins.begin(), begins.end(), token) - begins.begin() - 1;
}

std::string EvaluationData::fingerprint() const {
  std::string all = std::to_string(settings_.rows) + " " + settings_.data.positions;
  for (const Source& source : sources_) all += " " + source.index->digest();
  return checksum(all.data(), all.size());
}

}  // namespace annulus
