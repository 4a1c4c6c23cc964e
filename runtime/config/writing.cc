// Writes a configuration: as TOML, as texts of its keys that ranks compare, as the table of all keys in
// docs/reference/configuration.md, and as a file with comments to begin with.
#include <variant>

#include "common/text.h"
#include "runtime/config/config.h"
#include "runtime/config/keys.h"

namespace annulus {
namespace config_keys {

namespace {

struct ToToml {
  std::string operator()(int64_t v) const { return std::to_string(v); }
  std::string operator()(double v) const { return toml_number(v); }
  std::string operator()(bool v) const { return v ? "true" : "false"; }
  std::string operator()(const std::string& v) const { return toml_string(v); }
  std::string operator()(const std::vector<int64_t>& v) const { return list_text(v); }
  std::string operator()(const std::vector<std::string>& v) const { return list_text(v, toml_string); }
  std::string operator()(Activation v) const { return toml_string(activation_name(v)); }
  template <typename Structured>
  std::string operator()(const Structured& v) const {
    return v.text();
  }
};

}  // namespace

std::string value_text(const Key& key, const Config& config) { return std::visit(ToToml(), value_of(key, config)); }

}  // namespace config_keys

using namespace config_keys;  // NOLINT(google-build-using-namespace): this file belongs to it

std::string LayerPatterns::text() const {
  if (each.empty()) return all.text();
  return list_text(each, [](const PatternSpec& spec) { return spec.text(); });
}

std::string to_toml(const Config& config) {
  std::string out;
  std::string_view section;
  for (const Key& key : keys()) {
    if (key.section != section) {
      section = key.section;
      out += "\n[" + std::string(section) + "]\n";
    }
    out += std::string(key.name) + " = " + value_text(key, config) + "\n";
  }
  return out;
}

std::vector<KeyText> flatten(const Config& config) {
  std::vector<KeyText> texts;
  for (const Key& key : keys()) texts.push_back({key.full(), value_text(key, config)});
  return texts;
}

std::vector<ChangedKey> changed_keys(const Config& before, const Config& now) {
  std::vector<ChangedKey> changed;
  for (const Key& key : keys()) {
    ChangedKey change{key.full(), value_text(key, before), value_text(key, now), key.rules.of_model};
    if (change.was != change.is) changed.push_back(std::move(change));
  }
  return changed;
}

std::string config_reference() {
  const Config defaults;
  std::string out = "| key | default | values | meaning |\n|---|---|---|---|\n";
  for (const Key& key : keys()) {
    const Value value = value_of(key, defaults);
    const bool whole = std::holds_alternative<int64_t>(value);
    std::string range = range_text(key, whole);
    if (std::holds_alternative<bool>(value) || std::holds_alternative<LayerSwitch>(value)) range = "true, false";
    const std::string required = key.rules.imported ? "required without model.from" : "required";
    out += "| `" + key.full() + "` | " + (key.rules.required ? required : "`" + value_text(key, defaults) + "`") +
           " | " + range + " | " + std::string(key.doc) + " |\n";
  }
  return out;
}

namespace {

// What a key's value is, where range_text does not say it.
struct KindText {
  std::string operator()(int64_t) const { return "a whole number"; }
  std::string operator()(double) const { return "a number"; }
  std::string operator()(bool) const { return "true or false"; }
  std::string operator()(const std::string&) const { return "a string"; }
  std::string operator()(const std::vector<int64_t>&) const { return "a list of whole numbers"; }
  std::string operator()(const std::vector<std::string>&) const { return "a list of strings"; }
  std::string operator()(const Sources&) const { return "a list of strings, or of tables"; }
  std::string operator()(const ContextSchedule&) const { return "a whole number, or a list of lists of them"; }
  std::string operator()(const AccumulateSchedule&) const { return "a whole number, or a list of lists of them"; }
  std::string operator()(const ParameterGroups&) const { return "a list of tables"; }
  std::string operator()(const LayerPatterns&) const { return "a table, or a list of tables"; }
  std::string operator()(const RotaryScaling&) const { return "a table"; }
  std::string operator()(const LayerRotaries&) const { return "a list of tables"; }
  std::string operator()(const LayerSwitch&) const { return "true or false, or a list of them"; }
  std::string operator()(Activation) const { return "a string"; }
};

// "required; a whole number, 1 or more"
std::string kind_text(const Key& key, const Value& value) {
  const std::string range = range_text(key, std::holds_alternative<int64_t>(value));
  std::string text = !key.rules.choices.empty() ? range : std::visit(KindText(), value);
  if (key.rules.choices.empty() && !range.empty()) text += ", " + range;
  if (!key.rules.required) return text;
  return (key.rules.imported ? "required without model.from; " : "required; ") + text;
}

// Returns the text as lines of a comment, wrapped at 100 columns. No word is cut.
std::string comment(std::string_view text) {
  constexpr size_t kColumns = 100;
  std::string out, line = "#";
  for (const std::string& word : split(text, ' ')) {
    if (line.size() > 1 && line.size() + 1 + word.size() > kColumns) {
      out += line + "\n";
      line = "#";
    }
    line += " " + word;
  }
  return out + line + "\n";
}

}  // namespace

std::string config_template() {
  const Config defaults;
  std::string out = comment(
      "A configuration with every key, its default and what it is for, as `train --help-config` prints it. Required "
      "keys have examples, of a small model; all others may be left out.");
  std::string_view section;
  for (const Key& key : keys()) {
    if (key.section != section) {
      section = key.section;
      out += "\n[" + std::string(section) + "]\n";
    }
    const std::string value = key.rules.required ? std::string(key.rules.example) : value_text(key, defaults);
    out += "\n" + comment(key.doc) + comment("(" + kind_text(key, value_of(key, defaults)) + ")") +
           std::string(key.name) + " = " + value + "\n";
  }
  return out;
}

}  // namespace annulus
