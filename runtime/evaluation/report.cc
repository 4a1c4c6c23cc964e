// evaluation_table(); see report.h.
#include "runtime/evaluation/report.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "common/text.h"

namespace annulus {
namespace {

constexpr size_t kMostNameLetters = 40;

using TextRows = std::vector<std::vector<std::string>>;

// Columns of texts, the first left-aligned and the others right-aligned, two blanks apart.
std::string aligned(const TextRows& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string blanks(widths[c] - row[c].size(), ' ');
      line += (c == 0 ? "" : "  ") + (c == 0 ? row[c] + blanks : blanks + row[c]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string percent(double share) { return std::isnan(share) ? "-" : rounded(100 * share, 1); }

double ratio_of(int64_t part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); }

// Five significant digits, and all digits before the point of a number below a million.
std::string five_digits(double value) {
  if (!(value < 1e6)) return significant(value, 5);
  const int before = value < 1 ? 1 : 1 + static_cast<int>(std::log10(value));
  return rounded(value, std::max(0, 5 - before));
}

std::string loss_text(const LossBucket& bucket) { return bucket.targets == 0 ? "-" : rounded(bucket.mean(), 4); }

std::string perplexity_text(const LossBucket& bucket) {
  return bucket.targets == 0 ? "-" : five_digits(std::exp(bucket.mean()));
}

std::string error_text(const std::optional<double>& error) { return error ? rounded(*error, 4) : "-"; }

std::string head(const EvaluationResults& results) {
  std::string text = printable(results.model);
  if (results.step >= 0) text += ", step " + with_commas(results.step);
  if (results.context > 0) text += ", trained on rows of up to " + with_commas(results.context, "token");
  text += "; " + counted(results.ranks, "rank");
  for (const std::string& part : {results.layout, results.dtype}) {
    if (!part.empty()) text += ", " + part;
  }
  return text + "\n";
}

std::string source_table(const std::vector<SourceLosses>& sources) {
  TextRows rows = {
      {"source", "rows", "documents", "targets", "loss", "+-", "perplexity", "from", "to", "bits/byte", "+-"}};
  for (const SourceLosses& source : sources) {
    const LossBucket& all = source.all;
    std::string low = "-", high = "-", bits = "-", bits_error = "-";
    if (all.error) {
      low = five_digits(std::exp(all.mean() - *all.error));
      high = five_digits(std::exp(all.mean() + *all.error));
    }
    if (source.bits_per_byte) {
      bits = rounded(*source.bits_per_byte, 4);
      // Bits are the loss times a number that does not depend on the model.
      const double of_loss = all.nats > 0 ? *source.bits_per_byte / all.mean() : 0;
      if (all.error) bits_error = rounded(*all.error * of_loss, 4);
    }
    rows.push_back({printable(source.name, kMostNameLetters), with_commas(source.rows), with_commas(source.documents),
                    with_commas(all.targets), loss_text(all), error_text(all.error), perplexity_text(all), low, high,
                    bits, bits_error});
  }
  const bool intervals = std::any_of(sources.begin(), sources.end(),
                                     [](const SourceLosses& source) { return source.all.error.has_value(); });
  return "\n" + aligned(rows) +
         (intervals ? "losses are in nats; +-, from and to: 95 % intervals over documents\n" : "losses are in nats\n");
}

// Positions counted from 1, as in the picture: "1", "3 to 4".
std::string span_text(int64_t begin, int64_t end) {
  return begin + 1 >= end ? with_commas(end) : with_commas(begin + 1) + " to " + with_commas(end);
}

// The buckets of all sources side by side; "" if there are none.
std::string bucket_table(const std::vector<SourceLosses>& sources, std::vector<LossBucket> SourceLosses::*list,
                         const std::string& title) {
  std::map<std::pair<int64_t, int64_t>, std::vector<const LossBucket*>> spans;
  bool errors = false;
  for (size_t s = 0; s < sources.size(); ++s) {
    for (const LossBucket& bucket : sources[s].*list) {
      auto& row = spans[{bucket.begin, bucket.end}];
      row.resize(sources.size());
      row[s] = &bucket;
      errors = errors || bucket.error;
    }
  }
  if (spans.empty()) return "";
  TextRows rows = {{title}};
  for (const SourceLosses& source : sources) {
    const std::string name = sources.size() > 1 ? printable(source.name, kMostNameLetters) + ": " : "";
    rows[0].insert(rows[0].end(), {name + "targets", "loss"});
    if (errors) rows[0].emplace_back("+-");
    rows[0].emplace_back("perplexity");
  }
  for (const auto& [span, buckets] : spans) {
    rows.push_back({span_text(span.first, span.second)});
    for (const LossBucket* bucket : buckets) {
      const LossBucket none;
      const LossBucket& b = bucket ? *bucket : none;
      rows.back().insert(rows.back().end(), {with_commas(b.targets), loss_text(b)});
      if (errors) rows.back().push_back(error_text(b.error));
      rows.back().push_back(perplexity_text(b));
    }
  }
  return "\n" + aligned(rows);
}

// One task's cells: a row for each length, a column for each depth.
struct Grid {
  std::set<int64_t> lengths;
  std::set<std::optional<double>> depths;
  std::map<std::pair<int64_t, std::optional<double>>, const TaskCell*> cells;
  int64_t least_trials = INT64_MAX, most_trials = 0;
  bool generated = false;

  Grid(const EvaluationResults& results, const std::string& task) {
    for (const TaskCell& cell : results.cells) {
      if (cell.task != task) continue;
      lengths.insert(cell.length);
      depths.insert(cell.depth);
      cells[{cell.length, cell.depth}] = &cell;
      least_trials = std::min(least_trials, cell.trials);
      most_trials = std::max(most_trials, cell.trials);
      generated = generated || cell.generated;
    }
  }

  bool has_depths() const { return depths.size() > 1 || depths.begin()->has_value(); }

  const TaskCell* at(int64_t length, const std::optional<double>& depth) const {
    const auto found = cells.find({length, depth});
    return found == cells.end() ? nullptr : found->second;
  }

  std::vector<std::string> depth_texts(const std::string& without) const {
    std::vector<std::string> texts;
    for (const std::optional<double>& depth : depths) {
      texts.push_back(depth ? significant(100 * *depth, 3) + " %" : without);
    }
    return texts;
  }
};

std::string task_table(const EvaluationResults& results, const std::string& task) {
  const Grid grid(results, task);
  std::string trials = with_commas(grid.most_trials, "trial");
  if (grid.least_trials < grid.most_trials) trials = with_commas(grid.least_trials) + " to " + trials;
  std::string text = "\n" + printable(task, kMostNameLetters) + ": exact matches in percent, of " + trials + " each" +
                     (grid.has_depths() ? ", by length and depth\n" : ", by length\n");
  TextRows exact = {{"length"}};
  for (const std::string& depth : grid.depth_texts("exact")) exact[0].push_back(depth);
  if (grid.has_depths()) exact[0].emplace_back("all");
  exact[0].insert(exact[0].end(), {"trials", "tokens right", "loss"});
  TextRows found = {{"length"}};
  for (const std::string& depth : grid.depth_texts("found")) found[0].push_back(depth);
  for (const int64_t length : grid.lengths) {
    exact.push_back({with_commas(length)});
    found.push_back({with_commas(length)});
    TaskCell all;
    for (const std::optional<double>& depth : grid.depths) {
      const TaskCell* cell = grid.at(length, depth);
      exact.back().push_back(cell ? percent(ratio_of(cell->exact, cell->trials)) : "-");
      found.back().push_back(cell && cell->generated ? percent(*cell->generated) : "-");
      if (!cell) continue;
      all.trials += cell->trials;
      all.exact += cell->exact;
      all.tokens += cell->tokens;
      all.right += cell->right;
      all.nats += cell->nats;
    }
    if (grid.has_depths()) exact.back().push_back(percent(ratio_of(all.exact, all.trials)));
    exact.back().insert(exact.back().end(),
                        {with_commas(all.trials), percent(ratio_of(all.right, all.tokens)),
                         all.tokens == 0 ? "-" : rounded(all.nats / static_cast<double>(all.tokens), 4)});
  }
  text += aligned(exact);
  if (grid.generated) {
    text += printable(task, kMostNameLetters) + ", decoded: percent of the answers' strings that were found\n" +
            aligned(found);
  }
  return text;
}

std::string seconds_text(double seconds) { return rounded(seconds, seconds < 10 ? 3 : 1); }

std::string cost_text(const EvaluationResults& results) {
  const auto tokens = static_cast<double>(results.forward_tokens);
  std::string text =
      "\nforwards: " + with_commas(results.forward_tokens, "token") + " in " + seconds_text(results.seconds) + " s";
  if (results.forward_tokens > 0 && results.seconds > 0)
    text += " (" + with_commas(std::llround(std::min(tokens / results.seconds, 1e15))) + " tokens/s)";
  text += " and " + seconds_text(results.cpu_seconds) + " CPU seconds of all ranks";
  if (results.forward_tokens > 0) text += " (" + significant(results.cpu_seconds / tokens * 1e6, 4) + " us a token)";
  text += "\n";
  if (results.stopped) text += "incomplete: the evaluation was stopped before all had been measured\n";
  if (results.near_ties > 0) {
    text += "near ties: " + with_commas(results.near_ties, "choice") +
            " between tokens whose scores differ by less than rounding may change\n";
  }
  return text;
}

}  // namespace

std::string evaluation_table(const EvaluationResults& results) {
  std::string text = head(results);
  if (!results.sources.empty()) {
    text += source_table(results.sources);
    text += bucket_table(results.sources, &SourceLosses::doubling, "position in the row");
    text += bucket_table(results.sources, &SourceLosses::document_doubling, "position in the document");
  }
  for (const std::string& task : evaluated_tasks(results)) text += task_table(results, task);
  return text + cost_text(results);
}

}  // namespace annulus
