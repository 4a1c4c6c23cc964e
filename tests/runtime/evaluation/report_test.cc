// Tests of runtime/evaluation/report.h: the table has the numbers, JSON has them to the last digit and is read back,
// and the pictures have every point and cell.
#include "runtime/evaluation/report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/common/svg/parsed_svg.h"

namespace annulus::report_test {
namespace {

using testing::numbers_of;
using testing::ParsedPath;
using testing::ParsedSvg;
using testing::ParsedWord;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

SourceLosses source_of(const std::string& name, double nats_a_target) {
  SourceLosses source;
  source.name = name;
  source.rows = 12;
  source.documents = 1234;
  for (int64_t begin = 0, end = 1; begin < 1024; begin = end, end *= 2) {
    const int64_t targets = 12 * (end - begin);
    const double nats = nats_a_target * static_cast<double>(targets) * (1 + 1.0 / static_cast<double>(end));
    source.doubling.push_back({begin, end, targets, nats});
    source.all.targets += targets;
    source.all.nats += nats;
  }
  source.all.end = 1024;
  source.even = {{0, 512, 6144, 10000.1}, {512, 1024, 6144, 9000.3}};
  source.document_doubling = {source.doubling.begin(), source.doubling.begin() + 5};
  source.document_even = {{0, 16, 100, 1.0 / 3}};
  source.all.error = 0.0123;
  source.bits_per_byte = 0.9;
  return source;
}

TaskCell cell_of(const std::string& task, int64_t length, std::optional<double> depth, int64_t exact) {
  TaskCell cell;
  cell.task = task;
  cell.length = length;
  cell.depth = depth;
  cell.trials = 20;
  cell.exact = exact;
  cell.tokens = 140;
  cell.right = 7 * exact;
  cell.nats = 0.1 * static_cast<double>(20 - exact);
  return cell;
}

EvaluationResults results_of() {
  EvaluationResults results;
  results.model = "runs/long-001";
  results.step = 2000;
  results.ranks = 2;
  results.context = 512;
  results.layout = "zigzag";
  results.dtype = "fp32";
  results.sources = {source_of("books", 1.0 / 3), source_of("code", 0.7)};
  for (const int64_t length : {512, 1024, 2048}) {
    for (const double depth : {0.0, 0.5, 1.0}) {
      results.cells.push_back(cell_of("needle", length, depth, length == 2048 ? 3 : 19));
    }
    results.cells.push_back(cell_of("cwe", length, std::nullopt, 17));
  }
  results.seconds = 12.3;
  results.cpu_seconds = 45.6;
  results.forward_tokens = 1'048'576;
  results.near_ties = 3;
  return results;
}

// The words of the line that begins with these words, behind them.
std::vector<std::string> line_after(const std::string& text, const std::string& begin) {
  const size_t at = ("\n" + text).find("\n" + begin + " ");
  EXPECT_NE(at, std::string::npos) << begin << "\nin: " << text;
  std::vector<std::string> words;
  if (at == std::string::npos) return words;
  std::istringstream line(text.substr(at + begin.size(), text.find('\n', at) - at - begin.size()));
  for (std::string word; line >> word;) words.push_back(word);
  return words;
}

TEST(Table, HasTheNumbers) {
  EvaluationResults results = results_of();
  results.sources.resize(1);
  SourceLosses& books = results.sources[0];
  books.all = {0, 1024, 12288, 12288 * 1.25, 0.0123};
  books.doubling[2].nats = 24 * 0.5;
  const std::string text = evaluation_table(results);
  EXPECT_TRUE(
      text.starts_with("runs/long-001, step 2,000, trained on rows of up to 512 tokens; 2 ranks, zigzag, fp32\n"));
  EXPECT_EQ(line_after(text, "books"), (std::vector<std::string>{"12", "1,234", "12,288", "1.2500", "0.0123", "3.4903",
                                                                 "3.4477", "3.5335", "0.9000", "0.0089"}));
  EXPECT_EQ(line_after(text, "3 to 4"), (std::vector<std::string>{"24", "0.5000", "1.6487"}));
  EXPECT_NE(text.find("513 to 1,024"), std::string::npos);
  const size_t needle = text.find("needle: exact matches in percent, of 20 trials each, by length and depth\n");
  ASSERT_NE(needle, std::string::npos);
  EXPECT_EQ(line_after(text.substr(needle), "length"),
            (std::vector<std::string>{"0", "%", "50", "%", "100", "%", "all", "trials", "tokens", "right", "loss"}));
  EXPECT_EQ(line_after(text.substr(needle), "512"),
            (std::vector<std::string>{"95.0", "95.0", "95.0", "95.0", "60", "95.0", "0.0007"}));
  EXPECT_EQ(line_after(text.substr(needle), "2,048"),
            (std::vector<std::string>{"15.0", "15.0", "15.0", "15.0", "60", "15.0", "0.0121"}));
  const size_t words = text.find("cwe: exact matches in percent, of 20 trials each, by length\n");
  ASSERT_NE(words, std::string::npos);
  EXPECT_EQ(line_after(text.substr(words), "1,024"), (std::vector<std::string>{"85.0", "20", "85.0", "0.0021"}));
  EXPECT_NE(text.find("\nforwards: 1,048,576 tokens in 12.3 s (85,250 tokens/s) and 45.6 CPU seconds of all ranks "
                      "(43.49 us a token)\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("\nnear ties: 3 choices "), std::string::npos);
}

TEST(Table, HasDecodedAnswersAndHoles) {
  EvaluationResults results = results_of();
  results.cells[0].generated = 0.875;
  results.cells[4].trials = 0;  // not tried
  results.cells[4].exact = 0;
  results.cells.erase(results.cells.begin() + 6);
  const std::string text = evaluation_table(results);
  const size_t needle = text.find("needle: exact matches in percent, of 0 to 20 trials each");
  ASSERT_NE(needle, std::string::npos) << text;
  EXPECT_EQ(line_after(text.substr(needle), "1,024")[0], "-");
  EXPECT_EQ(line_after(text.substr(needle), "1,024")[2], "-");
  EXPECT_EQ(line_after(text.substr(needle), "1,024")[4], "20");
  const size_t decoded = text.find("needle, decoded: ");
  ASSERT_NE(decoded, std::string::npos);
  EXPECT_EQ(line_after(text.substr(decoded), "512"), (std::vector<std::string>{"87.5", "-", "-"}));
}

TEST(Table, IsSoundWithoutNumbers) {
  EXPECT_NE(evaluation_table({}).find("forwards: 0 tokens in 0.000 s and 0.000 CPU seconds"), std::string::npos);
  EvaluationResults results;
  results.sources.resize(2);
  results.sources[0].name = "empty\x1b\xff";
  results.sources[1].name = "broken";
  results.sources[1].all = {0, 4, 4, kNan};
  results.sources[1].doubling = {{0, 1, 1, 0}, {1, 2, 0, 0}, {2, 4, 2, 2e9}};
  const std::string text = evaluation_table(results);
  EXPECT_EQ(line_after(text, "empty??"), (std::vector<std::string>{"0", "0", "0", "-", "-", "-", "-", "-", "-", "-"}));
  EXPECT_EQ(line_after(text, "broken")[3], "nan");
  EXPECT_EQ(line_after(text, "1"), (std::vector<std::string>{"0", "-", "-", "1", "0.0000", "1.0000"}));
  EXPECT_EQ(line_after(text, "2"), (std::vector<std::string>{"0", "-", "-", "0", "-", "-"}));
  EXPECT_EQ(line_after(text, "3 to 4"), (std::vector<std::string>{"0", "-", "-", "2", "1000000000.0000", "inf"}));
  EXPECT_EQ(text.find("near ties"), std::string::npos);
}

TEST(Json, HasEveryNumberToTheLastDigit) {
  EvaluationResults results = results_of();
  results.sources[0].doubling[3].error = 1.0 / 7;
  results.cells[0].generated = 2.0 / 3;
  const auto all = nlohmann::json::parse(evaluation_json(results));
  EXPECT_EQ(all.at("format"), "annulus-evaluation-1");
  EXPECT_EQ(all.at("model"), "runs/long-001");
  EXPECT_EQ(all.at("step"), 2000);
  EXPECT_EQ(all.at("ranks"), 2);
  EXPECT_EQ(all.at("context"), 512);
  EXPECT_EQ(all.at("layout"), "zigzag");
  EXPECT_EQ(all.at("dtype"), "fp32");
  EXPECT_EQ(all.at("seconds"), 12.3);
  EXPECT_EQ(all.at("cpu_seconds"), 45.6);
  EXPECT_EQ(all.at("forward_tokens"), 1'048'576);
  EXPECT_EQ(all.at("near_ties"), 3);
  ASSERT_EQ(all.at("sources").size(), 2U);
  const auto& source = all.at("sources")[0];
  const SourceLosses& books = results.sources[0];
  EXPECT_EQ(source.at("name"), "books");
  EXPECT_EQ(source.at("rows"), 12);
  EXPECT_EQ(source.at("documents"), 1234);
  EXPECT_EQ(source.at("bits_per_byte"), 0.9);
  EXPECT_EQ(source.at("all").at("nats"), books.all.nats);
  EXPECT_EQ(source.at("all").at("loss"), books.all.mean());
  EXPECT_EQ(source.at("all").at("perplexity"), std::exp(books.all.mean()));
  EXPECT_EQ(source.at("all").at("error"), 0.0123);
  ASSERT_EQ(source.at("doubling").size(), 11U);
  ASSERT_EQ(source.at("even").size(), 2U);
  ASSERT_EQ(source.at("document_doubling").size(), 5U);
  ASSERT_EQ(source.at("document_even").size(), 1U);
  for (size_t i = 0; i < 11; ++i) {
    const auto& bucket = source.at("doubling")[i];
    EXPECT_EQ(bucket.at("begin"), books.doubling[i].begin);
    EXPECT_EQ(bucket.at("end"), books.doubling[i].end);
    EXPECT_EQ(bucket.at("targets"), books.doubling[i].targets);
    EXPECT_EQ(bucket.at("nats"), books.doubling[i].nats);
    EXPECT_EQ(bucket.at("loss"), books.doubling[i].mean());
    EXPECT_EQ(bucket.at("error").is_null(), i != 3);
  }
  EXPECT_EQ(source.at("doubling")[3].at("error"), 1.0 / 7);
  ASSERT_EQ(all.at("tasks").size(), results.cells.size());
  const auto& cell = all.at("tasks")[0];
  EXPECT_EQ(cell.at("task"), "needle");
  EXPECT_EQ(cell.at("length"), 512);
  EXPECT_EQ(cell.at("depth"), 0.0);
  EXPECT_EQ(cell.at("trials"), 20);
  EXPECT_EQ(cell.at("exact"), 19);
  EXPECT_EQ(cell.at("accuracy"), 19.0 / 20);
  EXPECT_EQ(cell.at("tokens"), 140);
  EXPECT_EQ(cell.at("right"), 133);
  EXPECT_EQ(cell.at("token_accuracy"), 133.0 / 140);
  EXPECT_EQ(cell.at("nats"), results.cells[0].nats);
  EXPECT_EQ(cell.at("generated"), 2.0 / 3);
  EXPECT_TRUE(all.at("tasks")[3].at("depth").is_null());
  EXPECT_TRUE(all.at("tasks")[3].at("generated").is_null());
}

TEST(Json, IsReadBack) {
  EvaluationResults results = results_of();
  results.sources[0].doubling[3].error = 1.0 / 7;
  results.sources[0].doubling[3].weight = 17.5;
  results.sources[1].all.error = std::nullopt;
  results.sources[1].bits_per_byte = std::nullopt;
  results.cells[0].generated = 2.0 / 3;
  for (const int64_t step : {-1, 0, 2000}) {
    results.step = step;
    const EvaluationResults read = results_of_json(evaluation_json(results));
    EXPECT_EQ(read.step, step);
    EXPECT_EQ(read.sources[0].all.error, 0.0123);
    EXPECT_EQ(read.sources[0].doubling[3].error, 1.0 / 7);
    EXPECT_EQ(read.sources[0].doubling[3].nats, results.sources[0].doubling[3].nats);
    EXPECT_EQ(read.sources[0].doubling[3].weight, 17.5);
    EXPECT_EQ(read.sources[0].doubling[3].mean(), results.sources[0].doubling[3].nats / 17.5);
    EXPECT_EQ(read.sources[0].doubling[2].weight, std::nullopt);
    EXPECT_EQ(read.cells[0].generated, 2.0 / 3);
    EXPECT_EQ(evaluation_json(read), evaluation_json(results));
    EXPECT_EQ(evaluation_table(read), evaluation_table(results));
  }
  EXPECT_EQ(evaluation_json(results_of_json(evaluation_json({}))), evaluation_json({}));
}

TEST(Json, WritesNoNumberThatJsonLacks) {
  EvaluationResults results = results_of();
  results.model = "a\xff\"b";
  results.seconds = std::numeric_limits<double>::infinity();
  results.sources[0].all.nats = kNan;
  results.sources[0].doubling[0] = {0, 1, 0, 0};
  results.sources[0].doubling[1].nats = 1e6;  // its perplexity is beyond a double
  results.cells[0].trials = results.cells[0].exact = 0;
  const std::string text = evaluation_json(results);
  const auto all = nlohmann::json::parse(text);
  EXPECT_TRUE(all.at("seconds").is_null());
  const auto& source = all.at("sources")[0];
  EXPECT_TRUE(source.at("all").at("loss").is_null());
  EXPECT_TRUE(source.at("doubling")[0].at("loss").is_null());
  EXPECT_TRUE(source.at("doubling")[1].at("perplexity").is_null());
  EXPECT_FALSE(source.at("doubling")[1].at("loss").is_null());
  EXPECT_TRUE(all.at("tasks")[0].at("accuracy").is_null());
  const EvaluationResults read = results_of_json(text);
  EXPECT_TRUE(std::isnan(read.sources[0].all.nats));
  EXPECT_TRUE(std::isnan(read.seconds));
}

TEST(Json, WrongFilesAreRefused) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    expect_error(ErrorKind::kInput, parts, [&] { results_of_json(text, "a.json"); });
  };
  refused("", {"a.json"});
  refused("{", {"a.json"});
  refused("[]", {"a.json", "annulus evaluate --json", "JSON without a format"});
  refused("{\"format\": \"annulus-bench-1\"}", {"a.json", "annulus-evaluation-1", "annulus-bench-1"});
  const auto good = nlohmann::json::parse(evaluation_json(results_of()));
  const auto changed = [&](const char* pointer, const nlohmann::json& value) {
    auto all = good;
    all[nlohmann::json::json_pointer(pointer)] = value;
    return all.dump();
  };
  refused(changed("/ranks", 0), {"a.json: ranks should be", "not 0"});
  refused(changed("/model", 7), {"a.json: model should be a text"});
  refused(changed("/sources", 7), {"a.json: sources should be a list"});
  refused(changed("/sources/1/doubling/2/targets", -1), {"sources[1].doubling[2].targets", "not -1"});
  refused(changed("/sources/0/even/1/end", 3), {"sources[0].even[1].end should be a whole number from 512"});
  refused(changed("/tasks/0/exact", 21), {"tasks[0].exact should be a whole number from 0 to 20"});
  refused(changed("/tasks/0/right", 141), {"tasks[0].right"});
  refused(changed("/tasks/0/depth", 1.5), {"tasks[0].depth should be a number from 0 to 1"});
  auto without = good;
  without.erase("near_ties");
  refused(without.dump(), {"a.json: near_ties is missing"});
  auto more = good;
  more["later"] = 1;
  EXPECT_EQ(evaluation_json(results_of_json(more.dump())), evaluation_json(results_of()))
      << "keys of later versions are ignored";
}

ParsedSvg sound(const std::string& svg) {
  EXPECT_EQ(testing::xml_fault(svg), "");
  EXPECT_EQ(svg.find("<script"), std::string::npos);
  ParsedSvg picture = testing::parse_svg(svg);
  EXPECT_EQ(testing::layout_fault(picture), "");
  return picture;
}

// The points of each line of a picture.
std::vector<size_t> points_of(const ParsedSvg& picture) {
  std::vector<size_t> counts;
  for (const ParsedPath& path : picture.paths) {
    const size_t numbers = numbers_of(path.d).size();
    if (path.fill == "none" && numbers > 4 && path.d.find('H') == std::string::npos) counts.push_back(numbers / 2);
  }
  return counts;
}

TEST(PerplexityPicture, HasALineForEachSourceOfEachRun) {
  const EvaluationResults before = results_of();
  EvaluationResults after = results_of();
  after.context = 1024;
  const ParsedSvg one = sound(perplexity_svg({{"", before}}));
  EXPECT_EQ(points_of(one), (std::vector<size_t>{11, 11}));
  for (const char* text :
       {"books", "code", "runs/long-001", "position in the row (tokens, 1K = 1,024)", "trained up to 512"}) {
    EXPECT_EQ(one.count(text), 1) << text;
  }
  const ParsedSvg two = sound(perplexity_svg({{"before", before}, {"after <8 & more>", after}}));
  EXPECT_EQ(points_of(two), (std::vector<size_t>{11, 11, 11, 11}));
  for (const char* text : {"before: books", "after <8 & more>: code", "trained up to 512 and 1K"}) {
    EXPECT_EQ(two.count(text), 1) << text;
  }
  EvaluationResults longest = results_of();
  longest.context = 2048;
  EXPECT_EQ(sound(perplexity_svg({{"a", before}, {"b", after}, {"c", longest}})).count("trained up to 512, 1K and 2K"),
            1);
  after.sources.resize(1);
  EXPECT_EQ(sound(perplexity_svg({{"after", after}})).count("after"), 1);
  EXPECT_EQ(points_of(sound(perplexity_svg({{"", before}}, PositionIn::kDocument))), (std::vector<size_t>{5, 5}));
}

TEST(PerplexityPicture, ABucketIsDrawnAtItsEnd) {
  EvaluationResults results = results_of();
  results.sources.resize(1);
  results.context = 0;
  // Perplexities of 2, 3 and 4, the buckets ending at 2, 16 and 1,024.
  results.sources[0].doubling = {
      {1, 2, 5, 5 * std::log(2)}, {8, 16, 7, 7 * std::log(3)}, {512, 1024, 9, 9 * std::log(4)}};
  const ParsedSvg picture = sound(perplexity_svg({{"", results}}));
  const auto word = [&](const std::string& text) {
    return std::find_if(picture.words.begin(), picture.words.end(), [&](const ParsedWord& w) { return w.text == text; })
        ->box;
  };
  const auto line = std::find_if(picture.paths.begin(), picture.paths.end(),
                                 [](const ParsedPath& path) { return numbers_of(path.d).size() == 6; });
  ASSERT_NE(line, picture.paths.end());
  const auto at = numbers_of(line->d);
  const std::vector<std::pair<std::string, std::string>> ticks = {{"2", "2.0"}, {"16", "3.0"}, {"1K", "4.0"}};
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(picture.count(ticks[i].first), 1);
    ASSERT_EQ(picture.count(ticks[i].second), 1);
    const Box below = word(ticks[i].first), beside = word(ticks[i].second);
    EXPECT_NEAR(at[2 * i], below.x + below.width / 2, 1);
    EXPECT_NEAR(at[2 * i + 1], beside.y + beside.height / 2, 2);
  }
}

TEST(PerplexityPicture, DrawsAnyBuckets) {
  EXPECT_EQ(sound(perplexity_svg({})).count("no data"), 1);
  EXPECT_EQ(sound(perplexity_svg({{"a", {}}})).count("no data"), 1);
  EvaluationResults results = results_of();
  results.sources.resize(1);
  results.sources[0].doubling = {{0, 1, 5, 0}};
  EXPECT_EQ(sound(perplexity_svg({{"", results}})).count("1.00"), 1) << "a loss of zero is a perplexity of 1";
  results.sources[0].doubling = {{0, 1, 5, 1}, {1, 2, 5, 2},     {2, 4, 0, 0},
                                 {4, 8, 5, 3}, {8, 16, 5, kNan}, {16, 20, 5, 3}};
  EXPECT_EQ(points_of(sound(perplexity_svg({{"", results}}))), (std::vector<size_t>{3}))
      << "a bucket without targets is no point, and NaN interrupts the line";
  results.sources[0].doubling = {{0, 1, 5, 1, 0.5}, {1, 2, 5, 2, 0.1}};
  const ParsedSvg banded = sound(perplexity_svg({{"", results}}));
  EXPECT_EQ(banded.count("runs/long-001, bands: 95 % intervals over documents"), 1);
}

TEST(TaskPicture, HasACellForEachLengthAndDepth) {
  EvaluationResults results = results_of();
  const ParsedSvg picture = sound(task_svg({"", results}, "needle"));
  constexpr size_t kScale = 11;
  EXPECT_EQ(picture.boxes.size(), 9 + kScale);
  EXPECT_EQ(picture.count("95"), 6);
  EXPECT_EQ(picture.count("15"), 3);
  for (const char* text : {"needle: exact matches", "20 trials a cell, trained up to 512, runs/long-001", "512", "1K",
                           "2K", "depth (%)", "length (tokens)", "exact (%)"}) {
    EXPECT_EQ(picture.count(text), 1) << text;
  }
  // Depth 0 is at the top, and lengths grow to the right.
  results.cells[0].exact = 1;  // 512 tokens, depth 0
  const ParsedSvg first = sound(task_svg({"<after>", results}, "needle"));
  const auto corner =
      std::find_if(first.words.begin(), first.words.end(), [&](const ParsedWord& w) { return w.text == "5"; });
  ASSERT_NE(corner, first.words.end());
  EXPECT_TRUE(testing::within(corner->box, first.boxes[0]));
  EXPECT_EQ(first.count("20 trials a cell, trained up to 512, <after>"), 1);
  results.cells.erase(results.cells.begin());
  EXPECT_EQ(sound(task_svg({"", results}, "needle")).count("-"), 1) << "a cell that was not tried";
}

TEST(TaskPicture, TasksWithoutDepthsAreOneRow) {
  const EvaluationResults results = results_of();
  EXPECT_EQ(evaluated_tasks(results), (std::vector<std::string>{"needle", "cwe"}));
  const ParsedSvg picture = sound(task_svg({"", results}, "cwe"));
  EXPECT_EQ(picture.count("85"), 3);
  EXPECT_EQ(picture.count("depth (%)"), 0);
  EXPECT_EQ(sound(task_svg({"", results}, "no such task")).count("no data"), 1);
}

TEST(TaskPicture, ShowsDecodedAnswers) {
  EvaluationResults results = results_of();
  results.cells[0].generated = 0.375;
  const ParsedSvg picture = sound(task_svg({"", results}, "needle", TaskScore::kGenerated));
  EXPECT_EQ(picture.count("37.5"), 1);
  EXPECT_EQ(picture.count("-"), 8);
  EXPECT_EQ(picture.count("needle: answers found by decoding"), 1);
}

TEST(TaskPicture, OneLengthOrOneDepthIsEnough) {
  EvaluationResults results = results_of();
  const std::vector<TaskCell> cells = results.cells;
  results.cells = {cells[0]};
  EXPECT_EQ(sound(task_svg({"", results}, "needle")).count("95"), 1);
  results.cells = {cells[0], cells[1], cells[2]};
  EXPECT_EQ(sound(task_svg({"", results}, "needle")).count("95"), 3);
  results.cells = {cells[0], cells[4], cells[8]};
  EXPECT_EQ(sound(task_svg({"", results}, "needle")).count("depth (%)"), 1);
}

}  // namespace
}  // namespace annulus::report_test
