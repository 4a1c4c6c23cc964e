// Reads a configuration: parse_config and load_config of config.h. keys.cc says which keys there are.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <set>
#include <sstream>
#include <utility>
#include <variant>

#include "common/error.h"
#include "common/files.h"
#include "common/names.h"
#include "common/text.h"
#include "common/toml.h"
#include "runtime/config/config.h"
#include "runtime/config/keys.h"
#include "runtime/config/values.h"

namespace annulus {

using namespace config_keys;  // NOLINT(google-build-using-namespace): this file belongs to it

namespace {

// Stores a node's value in the configuration. `where`: "file:line: key".
class Reader {
 public:
  Reader(const Key& key, const toml::node& node, std::string where)
      : key_(key), node_(node), where_(std::move(where)) {}

  void operator()(int64_t* at) const {
    const auto value = node_.value_exact<int64_t>();
    if (!value) wrong_type("a whole number");
    if (!key_.rules.range.holds(static_cast<double>(*value))) out_of_range(true, static_cast<double>(*value));
    *at = *value;
  }
  void operator()(double* at) const {
    auto value = node_.value_exact<double>();
    if (const auto whole = node_.value_exact<int64_t>()) value = static_cast<double>(*whole);
    if (!value) wrong_type("a number");
    if (!key_.rules.range.holds(*value)) out_of_range(false, *value);
    *at = *value;
  }
  void operator()(bool* at) const {
    const auto value = node_.value_exact<bool>();
    if (!value) wrong_type("true or false");
    *at = *value;
  }
  void operator()(std::string* at) const {
    const auto value = node_.value_exact<std::string>();
    if (!value) wrong_type("a string");
    check_choice(*value);
    if (key_.rules.check) key_.rules.check(*value, where_);
    *at = *value;
  }
  void operator()(std::vector<int64_t>* at) const {
    const toml::array* list = node_.as_array();
    if (!list) wrong_type("a list of whole numbers");
    std::vector<int64_t> values;
    for (const toml::node& element : *list) {
      const auto value = element.value_exact<int64_t>();
      if (!value || *value < 0) {
        refuse(where_, "expected a list of whole numbers, 0 or more, got " + shown(element) + " in it");
      }
      values.push_back(*value);
    }
    *at = std::move(values);
  }
  void operator()(std::vector<std::string>* at) const {
    const toml::array* list = node_.as_array();
    if (!list) wrong_type("a list of strings");
    std::vector<std::string> values;
    for (const toml::node& element : *list) {
      const auto value = element.value_exact<std::string>();
      if (!value) refuse(where_, "expected a list of strings, got " + shown(element) + " in it");
      values.push_back(*value);
    }
    *at = std::move(values);
  }
  void operator()(Sources* at) const { *at = read_sources(node_, where_); }
  void operator()(ContextSchedule* at) const { *at = read_contexts(node_, where_); }
  void operator()(RotaryScaling* at) const { *at = read_rotary_scaling(node_, where_); }
  void operator()(LayerRotaries* at) const { *at = read_layer_rotaries(node_, where_); }
  void operator()(LayerSwitch* at) const { *at = read_layer_switch(node_, where_); }
  void operator()(Activation* at) const {
    const auto value = node_.value_exact<std::string>();
    if (!value) wrong_type("a string");
    check_choice(*value);
    *at = *value == activation_name(Activation::kSilu) ? Activation::kSilu : Activation::kGeluTanh;
  }
  void operator()(AccumulateSchedule* at) const { *at = read_accumulate(node_, where_); }
  void operator()(ParameterGroups* at) const { *at = read_groups(node_, where_); }
  void operator()(LayerPatterns* at) const {
    if (const toml::table* table = node_.as_table()) {
      *at = pattern(*table, where_);
      return;
    }
    const toml::array* list = node_.as_array();
    const std::string expected = "a table such as { kind = \"causal\" }, or a list that repeats over the layers";
    if (!list) wrong_type(expected);
    if (list->empty()) refuse(where_, "expected " + expected + ", got an empty list");
    std::vector<PatternSpec> each;
    for (const toml::node& element : *list) {
      const std::string where = where_ + "[" + std::to_string(each.size()) + "]";
      const toml::table* table = element.as_table();
      if (!table) refuse_type(where, "a table such as { kind = \"causal\" }", element);
      each.push_back(pattern(*table, where));
    }
    *at = std::move(each);
  }

 private:
  void check_choice(const std::string& value) const {
    const std::vector<std::string>& choices = key_.rules.choices;
    if (choices.empty() || std::find(choices.begin(), choices.end(), value) != choices.end()) return;
    refuse(where_, "expected " + range_text(key_, false) + ", got \"" + value + "\"" + did_you_mean(value, choices));
  }
  [[noreturn]] void wrong_type(const std::string& expected) const { refuse_type(where_, expected, node_); }
  static PatternSpec pattern(const toml::table& table, const std::string& where) {
    std::ostringstream text;
    // Without this a table below a [section] header would be written as several lines.
    toml::table copy = table;
    copy.is_inline(true);
    text << copy;
    return parse_pattern(text.str(), where);
  }
  [[noreturn]] void out_of_range(bool whole, double value) const {
    refuse(where_, "expected " + range_text(key_, whole, value) + ", got " + shown(node_));
  }

  const Key& key_;
  const toml::node& node_;
  std::string where_;
};

std::string known_instead(const std::string& full) {
  const size_t dot = full.rfind('.');
  const std::string section = dot == std::string::npos ? "" : full.substr(0, dot);
  const std::string leaf = dot == std::string::npos ? full : full.substr(dot + 1);
  // Suggests a near name in the same section, else the same name in another one, else any near key.
  std::vector<std::string> names, leaves, elsewhere;
  for (const Key& key : keys()) {
    names.push_back(key.full());
    if (key.section == section) leaves.emplace_back(key.name);
    if (key.name == leaf) elsewhere.push_back(key.full());
  }
  std::string near = nearest(leaf, leaves);
  if (!near.empty() && !section.empty()) near = section + "." + near;
  if (near.empty()) near = elsewhere.empty() ? nearest(full, names) : elsewhere[0];
  if (!near.empty()) return "; did you mean \"" + near + "\"?";
  return leaves.empty() || section.empty() ? "" : "; [" + section + "] has: " + join(leaves, ", ");
}

std::string section_instead(const std::string& name) {
  std::vector<std::string> sections;
  for (const Key& key : keys()) {
    if (!key.section.empty() && (sections.empty() || sections.back() != key.section))
      sections.emplace_back(key.section);
  }
  const std::string near = nearest(name, sections);
  return near.empty() ? "; the sections are [" + join(sections, "], [") + "]" : "; did you mean [" + near + "]?";
}

bool is_section(std::string_view name) {
  return std::ranges::any_of(keys(), [&](const Key& key) { return !name.empty() && key.section == name; });
}

std::string place(const toml::node& node, std::string_view source) {
  const auto line = node.source().begin.line;
  return std::string(source) + (line ? ":" + std::to_string(line) : "");
}

// Applies all keys of a table; `seen` collects their full names.
void apply(const toml::table& table, std::string_view source, Config& config, std::set<std::string>& seen) {
  std::set<const Key*> given;
  const auto apply_key = [&](const std::string& full, const toml::node& node) {
    const Key* key = find_key(full);
    const std::string where = place(node, source);
    if (!key) refuse(where, "unknown key \"" + full + "\"" + known_instead(full));
    if (!given.insert(key).second) {
      refuse(where, "\"" + full + "\" and another name of the same key are both given: leave one of them out");
    }
    std::visit(Reader(*key, node, where + ": " + full), key->slot(config));
    seen.insert(key->full());
  };
  for (const auto& [name, node] : table) {
    const std::string top(name.str());
    if (!is_section(top)) {
      if (node.is_table()) refuse(place(node, source), "unknown section [" + top + "]" + section_instead(top));
      apply_key(top, node);
      continue;
    }
    const toml::table* section = node.as_table();
    if (!section) {
      refuse(place(node, source), top + ": expected a section [" + top + "], got " + std::string(type_name(node)));
    }
    for (const auto& [inner, value] : *section) apply_key(top + "." + std::string(inner.str()), value);
  }
}

toml::table read_toml(std::string_view text, std::string_view source) {
  try {
    return parse_toml(text, source);
  } catch (const TomlFault& fault) {
    throw Error(
        ErrorKind::kInput, "config",
        std::string(source) + (fault.line > 0 ? ":" + std::to_string(fault.line) : "") + ": not TOML: " + fault.what());
  }
}

// Whether the value is a number that is too large for TOML: 99999999999999999999, 1e400.
bool is_number_beyond(const std::string& value) {
  const auto beyond = [&](auto number) {
    const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    return error == std::errc::result_out_of_range && stop == value.data() + value.size();
  };
  return beyond(int64_t{0}) || beyond(0.0);
}

// Refuses a list or a table whose strings have no quotes, because a shell removes them outside single quotes. Raises
// Error(kUsage) that shows how to type it.
void refuse_lost_quotes(const std::string& full, const std::string& value) {
  if (value.size() < 2) return;
  const bool list = value.front() == '[' && value.back() == ']';
  if (!list && !(value.front() == '{' && value.back() == '}')) return;
  std::string meant = value;
  if (list && value.find_first_of("{\"'") == std::string::npos) {
    meant = "[";
    std::istringstream items(value.substr(1, value.size() - 2));
    for (std::string item; std::getline(items, item, ',');) {
      const size_t begin = item.find_first_not_of(' ');
      if (begin == std::string::npos) continue;
      meant += (meant.size() > 1 ? ", " : "") + toml_string(item.substr(begin, item.find_last_not_of(' ') + 1 - begin));
    }
    meant += "]";
  } else if (!list) {
    meant = "{ kind = \"causal\" }";
  }
  refuse("--set " + full, "expected TOML, got " + value +
                              "; a shell removes quotes unless the whole argument is in single quotes: --set " +
                              shell_quote({full + "=" + meant}));
}

// Applies one --set. The value is read as TOML if it is TOML, and otherwise taken as a string.
void apply_set(const std::string& set, Config& config, std::set<std::string>& seen) {
  const std::string source = "--set " + set;
  const size_t equals = set.find('=');
  if (equals == std::string::npos || equals == 0) refuse(source, "expected key=value, for example --set run.steps=100");
  const auto trimmed = [](std::string text) {
    const size_t begin = text.find_first_not_of(" \t");
    const size_t end = text.find_last_not_of(" \t");
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
  };
  const std::string full = trimmed(set.substr(0, equals));
  const std::string value = trimmed(set.substr(equals + 1));
  const Key* key = find_key(full);
  if (!key) refuse(source, "unknown key \"" + full + "\"" + known_instead(full));
  // Most often a variable of the shell that is not set.
  if (value.empty()) refuse(source, "expected a value after \"=\"; an empty text is typed as '" + full + "=\"\"'");
  toml::table table;
  const auto read = [&](const std::string& text) {
    try {
      table = parse_toml("value = " + text, source);
    } catch (const TomlFault&) {
      return false;
    }
    return table.size() == 1 && table.contains("value");
  };
  const Slot slot = key->slot(config);
  const bool wants_string = std::holds_alternative<std::string*>(slot);
  const bool whole = std::holds_alternative<int64_t*>(slot), number = whole || std::holds_alternative<double*>(slot);
  // A string may look like a number: --set run.name=7.
  if (const bool is_toml = read(value); !is_toml || (wants_string && !table.get("value")->is_string())) {
    if (!is_toml && !wants_string) refuse_lost_quotes(full, value);
    if (!is_toml && number && is_number_beyond(value)) {
      refuse("--set " + full, "expected " + range_text(*key, whole, std::strtod(value.c_str(), nullptr)) + ", got " +
                                  value + ", which does not fit in 64 bits");
    }
    if (!read(toml_string(value))) refuse(source, "expected text in UTF-8");
  }
  std::visit(Reader(*key, *table.get("value"), "--set " + full), key->slot(config));
  seen.insert(key->full());
}

bool has_documents(const PatternSpec& spec) {
  return !spec.documents.empty() || std::ranges::any_of(spec.members, has_documents);
}

void check_together(const Config& c, std::string_view source) {
  const auto fail = [&](const std::string& message) { refuse(std::string(source), message); };
  const ModelSection& m = c.model;
  if (m.heads % m.kv_heads != 0) {
    fail("model.heads = " + counted(m.heads, "query head") +
         " cannot share model.kv_heads = " + std::to_string(m.kv_heads) + ": heads must be a multiple of kv_heads");
  }
  if (m.head_size == 0 && m.dim % m.heads != 0) {
    const int64_t below = std::max<int64_t>(1, m.dim / m.heads) * m.heads;
    fail("model.dim = " + std::to_string(m.dim) + " cannot be split over model.heads = " + std::to_string(m.heads) +
         ": dim must be a multiple of heads, for example " + std::to_string(below) + ", or set model.head_dim");
  }
  if (m.head_dim() % 2 != 0) {
    fail((m.head_size > 0 ? "model.head_dim = " : "model.dim / model.heads = ") + std::to_string(m.head_dim()) +
         " must be even: the rotary embedding rotates pairs of numbers");
  }
  if (m.dtype == "fp64" && c.device == "cuda") {
    fail(
        "model.dtype = \"fp64\" computes on CPUs only, but device is \"cuda\": use device = \"cpu\", or \"fp32\" or "
        "\"bf16\"");
  }
  const auto given = static_cast<int64_t>(m.pattern.each.size());
  const auto fits = [&](const char* key, int64_t entries, const char* entry) {
    if (entries <= m.layers) return;
    fail(std::string("model.") + key + " lists " + counted(entries, entry) + " for model.layers = " +
         std::to_string(m.layers) + ": expected at most one for each layer; a shorter list repeats");
  };
  fits("pattern", given, "pattern");
  fits("rope_layers", static_cast<int64_t>(m.rope_layers.cycle.size()), "rotary setting");
  fits("attention_sinks", static_cast<int64_t>(m.attention_sinks.cycle.size()), "value");
  if (c.data.documents) {
    for (int64_t i = 0; i < std::max<int64_t>(1, given); ++i) {
      if (!has_documents(m.pattern.of(i))) continue;
      fail(
          "data.documents = true takes the documents from the data, but model.pattern has documents of its own: "
          "leave one of them out");
    }
  }
  if (c.optimizer.schedule == "wsd" && c.optimizer.decay == 0) {
    fail(
        "optimizer.schedule = \"wsd\" needs optimizer.decay, the number of steps over which the learning rate falls "
        "at the end");
  }
  if (c.optimizer.spike > 0 && c.optimizer.spike <= 1) {
    fail("optimizer.spike = " + exact(c.optimizer.spike) +
         " would make every norm above that share of the median a spike: expected 0 (off) or more than 1");
  }
  for (const ContextSchedule::Stage& stage : c.data.context.stages) {
    const int64_t batch = c.data.batch_of(stage);
    if (batch % c.mesh.data == 0) continue;
    fail((stage.batch > 0 ? "data.context: a batch of " : "data.batch = ") + counted(batch, "row") +
         " cannot be split over mesh.data = " + counted(c.mesh.data, "rank") + ": batch must be a multiple of it");
  }
}

}  // namespace

Config parse_config(std::string_view text, std::string_view source, const std::vector<std::string>& sets,
                    const ModelReader& read_model) {
  const toml::table table = read_toml(text, source);
  Config config;
  std::set<std::string> seen;
  const auto apply_all = [&] {
    apply(table, source, config, seen);
    for (const std::string& set : sets) apply_set(set, config, seen);
  };
  apply_all();
  const bool reads_model = read_model && !config.model.from.empty();
  if (reads_model) {
    const std::string folder = config.model.from;
    ModelSection model = read_model(config);
    config = Config();
    config.model = std::move(model);
    const Config imported = config;
    apply_all();
    for (const Key& key : keys()) {
      if (!key.rules.imported || value_text(key, config) == value_text(key, imported)) continue;
      refuse(std::string(source), key.full() + " = " + value_text(key, config) + ", but the model in " + folder +
                                      " has " + value_text(key, imported) + ": leave the key out");
    }
  }
  std::string missing;
  for (const Key& key : keys()) {
    if (key.rules.required && !(reads_model && key.rules.imported) && !seen.contains(key.full())) {
      missing += "\n  " + key.full() + ": " + std::string(key.doc);
    }
  }
  if (!missing.empty()) refuse(std::string(source), "required keys are missing:" + missing);
  ModelSection& m = config.model;
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.ffn == 0) m.ffn = (8 * m.dim + 3 * 64 - 1) / (3 * 64) * 64;
  check_together(config, source);
  if (m.dtype == "fp64") config.device = "cpu";
  return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& sets, const ModelReader& read_model) {
  return parse_config(read_small_file("config", path), path, sets, read_model);
}

}  // namespace annulus
