// evaluation_json() and results_of_json(); see report.h.
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/version.h"
#include "runtime/evaluation/report.h"

namespace annulus {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kFormat = "annulus-evaluation-1";
constexpr size_t kMostItems = 1'000'000;  // of a list

// The lists of buckets and their keys.
struct BucketList {
  const char* key;
  std::vector<LossBucket> SourceLosses::*buckets;
};
constexpr BucketList kBucketLists[] = {{"doubling", &SourceLosses::doubling},
                                       {"even", &SourceLosses::even},
                                       {"document_doubling", &SourceLosses::document_doubling},
                                       {"document_even", &SourceLosses::document_even}};

OrderedJson number(double value) { return std::isfinite(value) ? OrderedJson(value) : OrderedJson(); }

OrderedJson number(const std::optional<double>& value) { return value ? number(*value) : OrderedJson(); }

OrderedJson ratio(int64_t part, int64_t whole) {
  return number(static_cast<double>(part) / static_cast<double>(whole));  // 0 / 0 is null
}

OrderedJson json_of_bucket(const LossBucket& bucket) {
  OrderedJson json = {{"begin", bucket.begin},         {"end", bucket.end},
                      {"targets", bucket.targets},     {"nats", number(bucket.nats)},
                      {"loss", number(bucket.mean())}, {"perplexity", number(std::exp(bucket.mean()))},
                      {"error", number(bucket.error)}};
  if (bucket.weight) json["weight"] = number(*bucket.weight);
  return json;
}

OrderedJson json_of_source(const SourceLosses& source) {
  OrderedJson out = {{"name", source.name},
                     {"rows", source.rows},
                     {"documents", source.documents},
                     {"all", json_of_bucket(source.all)},
                     {"bits_per_byte", number(source.bits_per_byte)}};
  for (const BucketList& list : kBucketLists) {
    OrderedJson& buckets = out[list.key] = OrderedJson::array();
    for (const LossBucket& bucket : source.*list.buckets) buckets.push_back(json_of_bucket(bucket));
  }
  return out;
}

OrderedJson json_of_cell(const TaskCell& cell) {
  return {{"task", cell.task},
          {"length", cell.length},
          {"depth", number(cell.depth)},
          {"trials", cell.trials},
          {"exact", cell.exact},
          {"accuracy", ratio(cell.exact, cell.trials)},
          {"tokens", cell.tokens},
          {"right", cell.right},
          {"token_accuracy", ratio(cell.right, cell.tokens)},
          {"nats", number(cell.nats)},
          {"generated", number(cell.generated)}};
}

int64_t count_at(const CheckedJson& object, const char* key, int64_t most = INT64_MAX) {
  return object.at(key).integer(0, most);
}

// A number that may have been NaN or infinite when it was written.
double number_at(const CheckedJson& object, const char* key) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const CheckedJson value = object.at(key);
  return object.has(key) ? value.number(-kMost, kMost) : std::numeric_limits<double>::quiet_NaN();
}

std::optional<double> optional_at(const CheckedJson& object, const char* key,
                                  double most = std::numeric_limits<double>::max()) {
  const CheckedJson value = object.at(key);
  return object.has(key) ? std::optional<double>(value.number(0, most)) : std::nullopt;
}

LossBucket bucket_of(const CheckedJson& object) {
  LossBucket bucket;
  bucket.begin = count_at(object, "begin");
  bucket.end = object.at("end").integer(bucket.begin, INT64_MAX);
  bucket.targets = count_at(object, "targets");
  bucket.nats = number_at(object, "nats");
  bucket.error = optional_at(object, "error");
  if (object.has("weight")) bucket.weight = number_at(object, "weight");
  return bucket;
}

SourceLosses source_of(const CheckedJson& object) {
  SourceLosses source;
  source.name = object.at("name").text();
  source.rows = count_at(object, "rows");
  source.documents = count_at(object, "documents");
  source.all = bucket_of(object.at("all"));
  source.bits_per_byte = optional_at(object, "bits_per_byte");
  for (const BucketList& list : kBucketLists) {
    for (const CheckedJson& bucket : object.at(list.key).list(kMostItems)) {
      (source.*list.buckets).push_back(bucket_of(bucket));
    }
  }
  return source;
}

TaskCell cell_of(const CheckedJson& object) {
  TaskCell cell;
  cell.task = object.at("task").text();
  cell.length = count_at(object, "length");
  cell.depth = optional_at(object, "depth", 1);
  cell.trials = count_at(object, "trials");
  cell.exact = count_at(object, "exact", cell.trials);
  cell.tokens = count_at(object, "tokens");
  cell.right = count_at(object, "right", cell.tokens);
  cell.nats = number_at(object, "nats");
  cell.generated = optional_at(object, "generated", 1);
  return cell;
}

}  // namespace

std::string evaluation_json(const EvaluationResults& results) {
  OrderedJson sources = OrderedJson::array(), tasks = OrderedJson::array();
  for (const SourceLosses& source : results.sources) sources.push_back(json_of_source(source));
  for (const TaskCell& cell : results.cells) tasks.push_back(json_of_cell(cell));
  const OrderedJson all = {{"format", kFormat},
                           {"version", kVersion},
                           {"model", results.model},
                           {"step", results.step < 0 ? OrderedJson() : OrderedJson(results.step)},
                           {"ranks", results.ranks},
                           {"context", results.context},
                           {"layout", results.layout},
                           {"dtype", results.dtype},
                           {"sources", sources},
                           {"tasks", tasks},
                           {"seconds", number(results.seconds)},
                           {"cpu_seconds", number(results.cpu_seconds)},
                           {"forward_tokens", results.forward_tokens},
                           {"stopped", results.stopped},
                           {"near_ties", results.near_ties}};
  // Names come from paths, which may be any bytes.
  return all.dump(2, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace) + "\n";
}

EvaluationResults results_of_json(const std::string& text, const std::string& source) {
  const nlohmann::json parsed = parse_checked_json(text, "evaluate", source);
  const CheckedJson all(parsed, "evaluate", source);
  if (!parsed.is_object() || !parsed.contains("format") || parsed["format"] != kFormat) {
    throw Error(
        ErrorKind::kInput, "evaluate",
        source + ": expected results that `annulus evaluate --json` wrote (\"format\": \"" + kFormat + "\"), got " +
            (parsed.is_object() && parsed.contains("format") ? "the format " + shown_name(parsed["format"].dump())
                                                             : "JSON without a format"));
  }
  EvaluationResults results;
  results.model = all.at("model").text();
  results.step = all.has("step") ? count_at(all, "step") : -1;
  results.ranks = static_cast<int>(all.at("ranks").integer(1, INT32_MAX));
  results.context = count_at(all, "context");
  results.layout = all.at("layout").text();
  results.dtype = all.at("dtype").text();
  for (const CheckedJson& item : all.at("sources").list(kMostItems)) results.sources.push_back(source_of(item));
  for (const CheckedJson& item : all.at("tasks").list(kMostItems)) results.cells.push_back(cell_of(item));
  results.seconds = number_at(all, "seconds");
  results.cpu_seconds = number_at(all, "cpu_seconds");
  results.forward_tokens = count_at(all, "forward_tokens");
  results.stopped = all.at("stopped").boolean();
  results.near_ties = count_at(all, "near_ties");
  return results;
}

}  // namespace annulus
