// See values.h. Also the members of these values' types (config.h), among them how they are written as TOML.
#include "runtime/config/values.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "runtime/config/keys.h"

namespace annulus {
namespace config_keys {

std::string_view type_name(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "a whole number";
    case toml::node_type::floating_point:
      return "a number with a fraction";
    case toml::node_type::boolean:
      return "a boolean";
    default:
      return "a date or time";
  }
}

// The value as the user wrote it, for messages. Long values are cut.
std::string shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& n) { out << n; });
  std::string text = out.str();
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

void refuse(const std::string& where, const std::string& message) {
  throw Error(ErrorKind::kUsage, "config", where + ": " + message);
}

void refuse_type(const std::string& where, const std::string& expected, const toml::node& node) {
  refuse(where, "expected " + expected + ", got " + std::string(type_name(node)) + ": " + shown(node));
}

void refuse_key(const std::string& where, const std::string& name, const std::string& of,
                const std::vector<std::string>& names) {
  const std::string meant = did_you_mean(name, names);
  refuse(where,
         "unknown key \"" + name + "\" of " + of + (meant.empty() ? "; its keys are " + join(names, ", ") : meant));
}

std::string read_choice(const toml::node* node, const std::vector<std::string>& choices, const std::string& where,
                        const std::string& what) {
  const std::string value = node == nullptr ? "" : node->value_exact<std::string>().value_or("");
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    refuse(where, what + " one of " + list_text(choices, toml_string) + ", got " +
                      (node == nullptr ? "none" : shown(*node)) + did_you_mean(value, choices));
  }
  return value;
}

namespace {

constexpr int64_t kLongest = int64_t{1} << 38;  // tokens in a row; the product with a batch stays within 63 bits
constexpr int64_t kLargestBatch = 1 << 24;

std::vector<std::string> read_files(const toml::node& node, const std::string& where) {
  std::vector<std::string> files;
  if (const auto one = node.value_exact<std::string>()) {
    files.push_back(*one);
  } else {
    const toml::array* list = node.as_array();
    if (!list) refuse_type(where, "a list of strings", node);
    for (const toml::node& element : *list) {
      const auto file = element.value_exact<std::string>();
      if (!file) {
        refuse(where,
               "expected a list of strings, got " + std::string(type_name(element)) + " in it: " + shown(element));
      }
      files.push_back(*file);
    }
  }
  if (files.empty()) refuse(where, "expected at least one entry, got an empty list");
  for (const std::string& file : files) check_not_empty(file, where);
  return files;
}

int64_t read_whole(const toml::node& node, int64_t low, int64_t high, const std::string& where) {
  const auto value = node.value_exact<int64_t>();
  if (!value || *value < low || *value > high) {
    refuse(where, "expected a whole number from " + std::to_string(low) + " to " + std::to_string(high) + ", got " +
                      shown(node));
  }
  return *value;
}

SourceConfig read_source(const toml::table& table, const std::string& where) {
  static const std::vector<std::string> names = {"files", "weight", "name", "format", "width", "begin", "end"};
  SourceConfig source;
  for (const auto& [key, node] : table) {
    const std::string name(key.str()), at = where + "." + name;
    if (name == "files") {
      source.files = read_files(node, at);
    } else if (name == "weight") {
      const auto value = node.value<double>();
      if (!value || !(*value > 0 && *value <= 1e12))
        refuse(at, "expected a number above 0, at most 1e12, got " + shown(node));
      source.weight = *value;
    } else if (name == "name") {
      source.name = node.value_exact<std::string>().value_or("");
      if (source.name.empty()) refuse(at, "expected a name, got " + shown(node));
    } else if (name == "format") {
      source.format = read_choice(&node, {"auto", "text", "annulus", "megatron", "llmc", "nanogpt"}, at, "expected");
    } else if (name == "width") {
      source.width = read_whole(node, 16, 32, at);
      if (source.width != 16 && source.width != 32) refuse(at, "expected 16 or 32 bits, got " + shown(node));
    } else if (name == "begin") {
      source.begin = read_whole(node, 0, UINT32_MAX, at);
    } else if (name == "end") {
      source.end = read_whole(node, 0, UINT32_MAX, at);
    } else {
      refuse_key(where, name, "a source", names);
    }
  }
  if (source.files.empty()) refuse(where, "a source needs files = [\"FILE\", ...]");
  return source;
}

// Parses a list of stages [step, VALUE, ...] of at most `most` values, in the order of their steps. `read` parses one.
template <typename Schedule, typename Read>
Schedule read_stages(const toml::node& node, size_t most, const std::string& expected, const std::string& where,
                     const Read& read) {
  Schedule schedule;
  auto& stages = schedule.stages;
  stages.clear();
  for (const toml::node& element : *node.as_array()) {
    const toml::array* stage = element.as_array();
    if (!stage || stage->size() < 2 || stage->size() > most) {
      refuse(where, "expected " + expected + ", got " + shown(node));
    }
    stages.push_back(read(*stage, read_whole((*stage)[0], 0, kLongest, where + ": step")));
  }
  if (stages.empty()) refuse(where, "expected " + expected + ", got an empty list");
  if (stages[0].step != 0) {
    refuse(where, "expected the first stage to begin at step 0, got " + std::to_string(stages[0].step));
  }
  for (size_t i = 1; i < stages.size(); ++i) {
    if (stages[i].step > stages[i - 1].step) continue;
    refuse(where, "expected rising steps, got " + std::to_string(stages[i].step) + " after " +
                      std::to_string(stages[i - 1].step));
  }
  return schedule;
}

}  // namespace

Sources read_sources(const toml::node& node, const std::string& where) {
  const toml::array* list = node.as_array();
  const auto is_table = [](const toml::node& element) { return element.is_table(); };
  if (list == nullptr || std::none_of(list->begin(), list->end(), is_table)) return read_files(node, where);
  Sources sources;
  for (const toml::node& element : *list) {
    const std::string at = where + "[" + std::to_string(sources.list.size()) + "]";
    const toml::table* table = element.as_table();
    if (!table) refuse(at, "expected a table like the others, { files = [" + shown(element) + "] }");
    sources.list.push_back(read_source(*table, at));
  }
  const std::vector<SourceConfig>& all = sources.list;
  const auto weighted = std::count_if(all.begin(), all.end(), [](const SourceConfig& s) { return s.weight > 0; });
  if (weighted != 0 && weighted != static_cast<int64_t>(all.size())) {
    refuse(where, "expected a weight for every source, or for none (rows are then in proportion to sizes), got " +
                      std::to_string(weighted) + " for " + counted(static_cast<int64_t>(all.size()), "source"));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (sources.name(i) == sources.name(j))
        refuse(where, "two sources have the name " + toml_string(sources.name(i)));
    }
  }
  return sources;
}

ContextSchedule read_contexts(const toml::node& node, const std::string& where) {
  if (!node.is_array()) return read_whole(node, 1, kLongest, where);
  return read_stages<ContextSchedule>(
      node, 3, "a number, or a list of [step, context] such as [[0, 8192], [1000, 131072]]", where,
      [&](const toml::array& stage, int64_t step) -> ContextSchedule::Stage {
        return {.step = step,
                .context = read_whole(stage[1], 1, kLongest, where + ": context"),
                .batch = stage.size() > 2 ? read_whole(stage[2], 1, kLargestBatch, where + ": batch") : 0};
      });
}

AccumulateSchedule read_accumulate(const toml::node& node, const std::string& where) {
  if (!node.is_array()) return read_whole(node, 1, kLargestBatch, where);
  return read_stages<AccumulateSchedule>(
      node, 2, "a number, or a list of [step, batches] such as [[0, 1], [1000, 4]]", where,
      [&](const toml::array& stage, int64_t step) -> AccumulateSchedule::Stage {
        return {.step = step, .batches = read_whole(stage[1], 1, kLargestBatch, where + ": batches")};
      });
}

ParameterGroups read_groups(const toml::node& node, const std::string& where) {
  static const std::vector<std::string> names = {"match", "lr", "weight_decay"};
  const toml::array* list = node.as_array();
  const std::string expected = "a list of tables such as [{ match = \"*norm.weight\", lr = 0.5 }]";
  if (!list) refuse_type(where, expected, node);
  ParameterGroups groups;
  for (const toml::node& element : *list) {
    const std::string at = where + "[" + std::to_string(groups.list.size()) + "]";
    const toml::table* table = element.as_table();
    if (!table) refuse_type(at, expected, element);
    ParameterGroup group;
    for (const auto& [key, value] : *table) {
      const std::string name(key.str()), place = at + "." + name;
      const auto number = [&, &node = value] {
        const auto read = node.value<double>();
        if (!read || !(*read >= 0 && *read <= 1e12))
          refuse(place, "expected a number from 0 to 1e12, got " + shown(node));
        return *read;
      };
      if (name == "match") {
        group.match = value.value_exact<std::string>().value_or("");
      } else if (name == "lr") {
        group.lr = number();
      } else if (name == "weight_decay") {
        group.weight_decay = number();
      } else {
        refuse_key(at, name, "a group", names);
      }
    }
    if (group.match.empty()) refuse(at, "a group needs match = \"NAME\", the names of its parameters");
    groups.list.push_back(std::move(group));
  }
  return groups;
}

}  // namespace config_keys

using config_keys::refuse;

Sources::Sources(std::vector<std::string> files) {
  list.emplace_back();
  list.back().files = std::move(files);
}

std::string Sources::name(size_t i) const {
  if (!list[i].name.empty()) return list[i].name;
  return list.size() == 1 ? "train" : "source " + std::to_string(i + 1);
}

std::string Sources::text() const {
  const auto files = [](const SourceConfig& source) { return list_text(source.files, toml_string); };
  if (list.size() == 1) {
    const Sources plain(list[0].files);
    if (plain == *this) return files(list[0]);
  }
  return list_text(list, [&](const SourceConfig& source) {
    std::string text = "{ files = " + files(source);
    if (source.weight > 0) text += ", weight = " + toml_number(source.weight);
    if (!source.name.empty()) text += ", name = " + toml_string(source.name);
    if (source.format != "auto") text += ", format = " + toml_string(source.format);
    if (source.width > 0) text += ", width = " + std::to_string(source.width);
    if (source.begin >= 0) text += ", begin = " + std::to_string(source.begin);
    if (source.end >= 0) text += ", end = " + std::to_string(source.end);
    return text + " }";
  });
}

int64_t ContextSchedule::longest() const {
  const auto shorter = [](const Stage& a, const Stage& b) { return a.context < b.context; };
  return std::max_element(stages.begin(), stages.end(), shorter)->context;
}

std::string ContextSchedule::text() const {
  if (stages.size() == 1 && stages[0].batch == 0) return std::to_string(stages[0].context);
  return list_text(stages, [](const Stage& stage) {
    return "[" + std::to_string(stage.step) + ", " + std::to_string(stage.context) +
           (stage.batch > 0 ? ", " + std::to_string(stage.batch) : "") + "]";
  });
}

int64_t AccumulateSchedule::most() const {
  const auto fewer = [](const Stage& a, const Stage& b) { return a.batches < b.batches; };
  return std::max_element(stages.begin(), stages.end(), fewer)->batches;
}

std::string AccumulateSchedule::text() const {
  if (stages.size() == 1) return std::to_string(stages[0].batches);
  return list_text(stages, [](const Stage& stage) {
    return "[" + std::to_string(stage.step) + ", " + std::to_string(stage.batches) + "]";
  });
}

std::vector<DataConfig::Stage> DataConfig::stages() const {
  std::set<int64_t> begins;
  for (const ContextSchedule::Stage& stage : context.stages) begins.insert(stage.step);
  for (const AccumulateSchedule::Stage& stage : accumulate.stages) begins.insert(stage.step);
  std::vector<Stage> stages;
  for (const int64_t step : begins) {
    const ContextSchedule::Stage& rows = context.stages[stage_at(context.stages, step)];
    const int64_t batches = accumulate.stages[stage_at(accumulate.stages, step)].batches;
    stages.push_back({.step = step, .context = rows.context, .batch = batch_of(rows), .accumulate = batches});
  }
  return stages;
}

std::string ParameterGroups::text() const {
  return list_text(list, [](const ParameterGroup& group) {
    std::string text = "{ match = " + toml_string(group.match);
    if (group.lr != 1) text += ", lr = " + toml_number(group.lr);
    if (group.weight_decay) text += ", weight_decay = " + toml_number(*group.weight_decay);
    return text + " }";
  });
}

SourceConfig parse_source(std::string_view text, std::string_view where) {
  const std::string place(where);
  if (text.empty()) config_keys::refuse(place, "expected a file, got nothing");
  if (text[0] != '{' && text[0] != '[') return {.name = std::string(text), .files = {std::string(text)}};
  toml::table document;
  try {
    document = parse_toml("source = " + std::string(text));
  } catch (const TomlFault& fault) {
    config_keys::refuse(place, std::string(text) + " is not TOML: " + fault.what());
  }
  const toml::node& node = *document.get("source");
  toml::array list;
  if (node.is_table()) list.push_back(*node.as_table());
  SourceConfig source = config_keys::read_sources(node.is_table() ? list : node, place).list.at(0);
  if (source.name.empty()) source.name = join(source.files, ", ");
  return source;
}

}  // namespace annulus
