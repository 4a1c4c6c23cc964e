// See dataset.h. This file makes what a checkpoint records of the data, and continues a run from it.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "common/text.h"
#include "runtime/data/dataset.h"
#include "runtime/data/shards/refuse.h"

namespace annulus {
namespace {

using nlohmann::json;

constexpr int kStateVersion = 1;
constexpr int64_t kLongest = int64_t{1} << 40;  // tokens in a row

json to_json(const PackSettings& s) {
  return {{"packing", packing_name(s.packing)},
          {"documents", s.documents},
          {"validation_fraction", s.validation_fraction},
          {"refuse_long", s.refuse_long}};
}

PackSettings settings_from(const json& from, int64_t context) {
  return {.context = context,
          .packing = packing_named(from.at("packing").get<std::string>()),
          .documents = from.at("documents").get<bool>(),
          .validation_fraction = from.at("validation_fraction").get<double>(),
          .refuse_long = from.at("refuse_long").get<bool>()};
}

}  // namespace

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
  // Phases that have not begun count, too: a run that has gone back may leave out rows of later ones.
  json left_out = json::array();
  for (const Phase& phase : phases_) {
    for (const int64_t out : phase.left_out) {
      left_out.push_back({{"phase", phase.step}, {"first", out * phase.rows}, {"rows", phase.rows}});
    }
  }
  json sources = json::object();
  const auto add = [&](const std::string& digest, const std::string& name, const SourceUse& use) {
    sources[digest] = {{"name", name}, {"rows", use.rows}, {"targets", use.targets}, {"documents", use.documents}};
  };
  for (const auto& [digest, source] : gone_) add(digest, source.first, source.second);
  for (size_t s = 0; s < sources_.size(); ++s) add(sources_[s].digest, name(s), uses[s]);
  json all{{"version", kStateVersion}, {"phases", std::move(phases)},        {"sources", std::move(sources)},
           {"tokenizer", tokenizer_},  {"token", is_text() ? "byte" : "id"}, {"seed", seed_}};
  if (!left_out.empty()) all["left_out"] = std::move(left_out);
  return all.dump();
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
  bool bytes = false;
  decltype(gone_) gone;
  struct LeftOut {
    int64_t phase, first, rows;
  };
  std::vector<LeftOut> left_out;
  try {
    const json from = json::parse(state);
    if (from.at("version").get<int>() != kStateVersion) refuse_data("it was written by a later version of annulus");
    tokenizer = from.at("tokenizer").get<std::string>();
    seed = from.at("seed").get<int64_t>();
    bytes = from.at("token").get<std::string>() == "byte";
    for (const auto& [digest, source] : from.at("sources").items()) {
      names[digest] = source.at("name").get<std::string>();
      const SourceUse use{source.at("rows").get<int64_t>(), source.at("targets").get<int64_t>(),
                          source.at("documents").get<int64_t>()};
      const auto here = std::ranges::find_if(sources_, [&, key = digest](const Source& s) { return s.digest == key; });
      if (here == sources_.end()) {
        gone[digest] = {names[digest], use};
      } else {
        uses[static_cast<size_t>(here - sources_.begin())] = use;
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
      const bool weighs = !phase.sources.empty() && std::ranges::all_of(phase.sources, [](const Phase::Source& s) {
        return s.weight > 0 && std::isfinite(s.weight);
      });
      const bool small = phase.context >= 1 && phase.context <= kLongest && phase.rows >= 1 &&
                         phase.rows <= (int64_t{1} << 62) / std::max<int64_t>(1, step);
      if (!rises || !weighs || !small || phase.step >= step) refuse_data("its phases are invalid");
      phases.push_back(std::move(phase));
    }
    if (phases.empty()) refuse_data("it names no rows that were drawn");
    for (const json& saved : from.value("left_out", json::array())) {
      left_out.push_back(
          {saved.at("phase").get<int64_t>(), saved.at("first").get<int64_t>(), saved.at("rows").get<int64_t>()});
      const LeftOut& out = left_out.back();
      if (out.rows < 1 || out.first < 0 || out.first % out.rows != 0)
        refuse_data("the rows that it leaves out are invalid");
    }
  } catch (const json::exception& error) {
    refuse_data("the checkpoint's record of the data is damaged: " + std::string(error.what()));
  } catch (const Error& error) {
    refuse_data("the checkpoint's record of the data is damaged: " + std::string(error.message()));
  }
  if (bytes != is_text()) {
    refuse_data("the run was trained on " + std::string(bytes ? "the bytes of texts" : "ids of tokens") +
                ", but data.train names " + (bytes ? "shards of tokens" : "texts, whose tokens are bytes") +
                ": its weights are meaningless with other ids");
  }
  if (tokenizer_.empty()) tokenizer_ = tokenizer;
  if (!tokenizer.empty() && tokenizer != tokenizer_) {
    refuse_data("the run was trained on tokens of the tokenizer " + tokenizer + ", but the shards belong to " +
                tokenizer_ + ": its weights are meaningless with other ids");
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
  // A stage of data.context that begins here is not a change.
  if (!planned(step - 1).front().continues(was)) {
    const std::string from = "from step " + with_commas(step + 1) + " on ";
    if (is.settings.text() != was.settings.text()) {
      told.push_back("the data: " + from + is.settings.words() + " (before: " + was.settings.words() + "): " +
                     (is.settings.units_are_documents() == was.settings.units_are_documents()
                          ? "what is left of each source's epoch is packed anew"
                          : "only one of the two keeps documents apart, so each source begins its next epoch"));
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
      return std::ranges::find_if(in, [&](const Phase::Source& s) { return s.digest == digest; });
    };
    for (const Phase::Source& source : was.sources) {
      if (find(is.sources, source.digest) != is.sources.end()) continue;
      told.push_back("the data: source " + name_of(source.digest) + " was changed or removed: " + from +
                     "no rows come from it");
    }
    const auto sum = [](const std::vector<Phase::Source>& of) {
      return std::accumulate(of.begin(), of.end(), 0.0,
                             [](double total, const Phase::Source& s) { return total + s.weight; });
    };
    for (size_t s = 0; s < is.sources.size(); ++s) {
      const auto before = find(was.sources, is.sources[s].digest);
      const bool seen = std::ranges::any_of(
          phases, [&](const Phase& phase) { return find(phase.sources, is.sources[s].digest) != phase.sources.end(); });
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
  bool unknown = false;
  for (const LeftOut& out : left_out) {
    const auto phase =
        std::ranges::find_if(phases, [&](const Phase& p) { return p.step == out.phase && p.rows == out.rows; });
    unknown = unknown || phase == phases.end();
    if (phase != phases.end()) phase->left_out.push_back(out.first / out.rows);
  }
  for (Phase& phase : phases) std::ranges::sort(phase.left_out);
  if (unknown) {
    told.emplace_back(
        "the data: the rows that were to be left out after a spike do not exist with these stages: all rows are drawn");
  }
  follow(std::move(phases));
  first_step_ = step;
  resumed_uses_ = std::move(uses);
  gone_ = std::move(gone);
  return told;
}

}  // namespace annulus
