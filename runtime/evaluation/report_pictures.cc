// perplexity_svg() and task_svg(); see report.h.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "common/svg/heat_map.h"
#include "common/svg/line_chart.h"
#include "common/text.h"
#include "runtime/evaluation/report.h"

namespace annulus {
namespace {

// "after: books", or the part of it that tells the lines of a picture apart.
std::string line_name(const LabelledResults& run, const SourceLosses& source) {
  if (run.label.empty()) return source.name;
  return run.results.sources.size() > 1 ? run.label + ": " + source.name : run.label;
}

ChartLine perplexity_line(const std::string& name, const std::vector<LossBucket>& buckets) {
  ChartLine line{name, {}};
  for (const LossBucket& bucket : buckets) {
    if (bucket.targets == 0) continue;
    ChartPoint point{static_cast<double>(bucket.end), std::exp(bucket.mean())};
    if (bucket.error) {
      point.low = std::exp(bucket.mean() - *bucket.error);
      point.high = std::exp(bucket.mean() + *bucket.error);
    }
    line.points.push_back(point);
  }
  return line;
}

// A length as RULER writes it: "128K" for 131072.
std::string length_text(int64_t length) {
  if (length < 1024 || length % 1024 != 0) return with_commas(length);
  return length % (1024 * 1024) == 0 ? with_commas(length / 1024 / 1024) + "M" : with_commas(length / 1024) + "K";
}

// "trained up to 256, 1K and 8K": the longest rows of the trainings; "" if none is known.
std::string trained_up_to(const std::set<int64_t>& contexts) {
  std::vector<std::string> ends;
  for (const int64_t context : contexts) {
    if (context > 0) ends.push_back(length_text(context));
  }
  if (ends.empty()) return "";
  const std::string last = ends.back();
  ends.pop_back();
  return "trained up to " + join(ends, ", ") + (ends.empty() ? "" : " and ") + last;
}

std::string joined(const std::vector<std::string>& parts) {
  std::vector<std::string> filled;
  for (const std::string& part : parts) {
    if (!part.empty()) filled.push_back(part);
  }
  return join(filled, ", ");
}

std::string trials_text(const std::vector<const TaskCell*>& cells) {
  if (cells.empty()) return "";
  const auto fewer = [](const TaskCell* a, const TaskCell* b) { return a->trials < b->trials; };
  const auto [least, most] = std::minmax_element(cells.begin(), cells.end(), fewer);
  const std::string text = with_commas((*most)->trials, "trial") + " a cell";
  return (*least)->trials == (*most)->trials ? text : with_commas((*least)->trials) + " to " + text;
}

std::optional<double> score_of(const TaskCell& cell, TaskScore score) {
  if (score == TaskScore::kGenerated) return cell.generated;
  if (cell.trials == 0) return std::nullopt;
  return static_cast<double>(cell.exact) / static_cast<double>(cell.trials);
}

}  // namespace

std::string perplexity_svg(const std::vector<LabelledResults>& runs, PositionIn where) {
  const bool in_row = where == PositionIn::kRow;
  LineChart chart;
  chart.title = "Perplexity against position";
  chart.subtitle = runs.size() == 1 ? runs[0].results.model : "";
  chart.x_label = std::string("position in the ") + (in_row ? "row" : "document") + " (tokens, 1K = 1,024)";
  chart.y_label = "perplexity";
  std::set<int64_t> contexts;
  bool bands = false;
  for (const LabelledResults& run : runs) {
    contexts.insert(run.results.context);
    for (const SourceLosses& source : run.results.sources) {
      ChartLine line = perplexity_line(line_name(run, source), in_row ? source.doubling : source.document_doubling);
      for (const ChartPoint& point : line.points) bands = bands || point.low.has_value();
      if (!line.points.empty()) chart.lines.push_back(std::move(line));
    }
  }
  if (bands) chart.subtitle = joined({chart.subtitle, "bands: 95 % intervals over documents"});
  for (const int64_t context : contexts) chart.marks.push_back({static_cast<double>(context), trained_up_to(contexts)});
  return line_chart_svg(chart);
}

std::vector<std::string> evaluated_tasks(const EvaluationResults& results) {
  std::vector<std::string> names;
  for (const TaskCell& cell : results.cells) {
    if (std::find(names.begin(), names.end(), cell.task) == names.end()) names.push_back(cell.task);
  }
  return names;
}

std::string task_svg(const LabelledResults& run, const std::string& task, TaskScore score) {
  std::vector<const TaskCell*> cells;
  std::set<int64_t> lengths;
  std::set<std::optional<double>> depths;
  for (const TaskCell& cell : run.results.cells) {
    if (cell.task != task) continue;
    cells.push_back(&cell);
    lengths.insert(cell.length);
    depths.insert(cell.depth);
  }
  HeatMap map;
  map.title = task + (score == TaskScore::kExact ? ": exact matches" : ": answers found by decoding");
  // The label comes last, because it may be long, and what does not fit is cut.
  map.subtitle = joined(
      {trials_text(cells), trained_up_to({run.results.context}), run.label.empty() ? run.results.model : run.label});
  map.x_label = "length (tokens)";
  map.y_label = "depth (%)";
  map.scale_label = score == TaskScore::kExact ? "exact" : "found";
  std::map<int64_t, size_t> column_of;
  std::map<std::optional<double>, size_t> row_of;
  for (const int64_t length : lengths) {
    column_of[length] = map.columns.size();
    map.columns.push_back(length_text(length));
  }
  for (const std::optional<double>& depth : depths) {
    row_of[depth] = map.rows.size();
    map.rows.push_back(depth ? significant(100 * *depth, 3) : "");
  }
  map.shares.assign(map.rows.size(), std::vector<std::optional<double>>(map.columns.size()));
  for (const TaskCell* cell : cells) map.shares[row_of[cell->depth]][column_of[cell->length]] = score_of(*cell, score);
  return heat_map_svg(map);
}

}  // namespace annulus
