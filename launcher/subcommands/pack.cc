// annulus pack: finds or makes the row indexes that `train` needs for a configuration, and shows what is in them. The
// work is done by runtime/data/dataset.h and runtime/data/row_index.h.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "launcher/subcommand.h"
#include "runtime/config/config.h"
#include "runtime/data/dataset.h"
#include "runtime/data/row_index.h"
#include "runtime/data/shards/corpus.h"
#include "runtime/huggingface/model_config.h"

namespace annulus {
namespace {

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);  // the next line may take minutes
}

// "12.3%"
std::string percent(int64_t part, int64_t all) {
  return rounded(all > 0 ? 100.0 * static_cast<double>(part) / static_cast<double>(all) : 0.0, 1) + " %";
}

std::string counts_text(const PartCounts& counts, int64_t context, bool trees) {
  const int64_t places = counts.rows * context;
  return with_commas(counts.documents, "document") + ", " + with_commas(counts.tokens, "token") + ": " +
         with_commas(counts.targets, "target") + " in " + with_commas(counts.rows, "row") + ", " +
         percent(places - counts.targets, places) + (trees ? " padding or repeated" : " padding") + "; left out " +
         with_commas(counts.first_tokens, "first token") + ", " + with_commas(counts.lone_tokens, "document") +
         " of one token";
}

// "; of them 1,234 count (12.3 %)", where a source says which targets count; otherwise empty.
std::string counted_text(const Corpus& corpus, const RowIndex& index, Split split) {
  if (!corpus.marks_targets()) return "";
  int64_t counted = 0;
  for (int64_t row = 0; row < index.rows(split); ++row) {
    for (const Piece& piece : index.row(split, row)) {
      if (!piece.repeated) counted += corpus.counted(piece.token + 1, piece.count);
    }
  }
  return "; " + with_commas(counted, "target") + " of them count (" + percent(counted, index.targets(split)) + ")";
}

class PackSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("CONFIG", config_path_, "TOML file, such as configs/quickstart.toml")->required();
    add_repeated(app, "--set", sets_, "override one key of the configuration: --set data.packing=best-fit",
                 "KEY=VALUE");
    app.add_flag("--verify", verify_, "also read all tokens and indexes, and check them");
    app.footer(
        "Examples:\n"
        "  ./annulus pack configs/quickstart.toml\n"
        "  ./annulus pack configs/quickstart.toml --set data.packing=best-fit --set data.context=1024");
  }

  void check() override { config_ = load_config(config_path_, sets_, read_model_from); }

  int run() override {
    install_interrupt_handlers();
    try {
      pack_all();
    } catch (const Error&) {
      if (!interrupted()) throw;
      log_warn("pack", "interrupted; finished indexes are kept");
      return interrupt_exit_code();
    }
    return 0;
  }

 private:
  void pack_all() const {
    const DataConfig& data = config_.data;
    std::set<int64_t> contexts;
    for (const ContextSchedule::Stage& stage : data.context.stages) contexts.insert(stage.context);
    for (size_t i = 0; i < data.train.list.size(); ++i) {
      const Corpus corpus(data.train.list[i], data.max_bytes);
      say(data.train.name(i) + ": " + corpus.text());
      Dataset::require_settings(data, corpus, data.train.name(i));
      if (verify_) {
        corpus.verify();
        say("  verified: every size, hash and checksum that is stored");
      }
      for (const int64_t context : contexts) pack(corpus, Dataset::pack_settings(data, context));
    }
    // The tokens that are left of an epoch when data.context changes depend on all sources together.
    if (data.context.stages.size() == 1) return;
    const Dataset all(data, config_.run.seed, config_.model.vocab);
    say("the rest of each epoch in which data.context changes is packed, too");
  }

  void pack(const Corpus& corpus, const PackSettings& settings) const {
    const std::string folder = Dataset::index_folder(config_.data, corpus);
    const auto begin = std::chrono::steady_clock::now();
    std::string how = "in memory, when a run begins";
    std::shared_ptr<const RowIndex> index;
    if (folder.empty()) {
      index = RowIndex::make(corpus, settings);
    } else if ((index = RowIndex::find(corpus, settings, folder))) {
      how = index->path() + " (was there)";
    } else {
      index = RowIndex::find_or_make(corpus, settings, folder);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      how = index->path() + " (made in " + rounded(took.count(), 1) + " s)";
    }
    say("  rows of " + with_commas(settings.context) + ", " + std::string(packing_name(settings.packing)) + ": " + how);
    say("    training    " + counts_text(index->counts(Split::kTrain), settings.context, corpus.has_trees()) +
        counted_text(corpus, *index, Split::kTrain));
    if (settings.validation_fraction > 0) {
      say("    validation  " + counts_text(index->counts(Split::kValidation), settings.context, corpus.has_trees()) +
          counted_text(corpus, *index, Split::kValidation) +
          (index->tail_held_out() ? "; the tail of the source" : ""));
    }
    if (verify_) {
      index->verify();
      say("    verified");
    }
  }

  std::string config_path_;
  std::vector<std::string> sets_;
  bool verify_ = false;
  Config config_;
};

}  // namespace

std::unique_ptr<Subcommand> make_pack_subcommand() { return std::make_unique<PackSubcommand>(); }

}  // namespace annulus
