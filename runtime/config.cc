// See config.h.
#include "runtime/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <utility>
#include <variant>

#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "common/error.h"
#include "common/nearest.h"

namespace annulus {
namespace {

// Where a key's value lies in a Config, and of which type it is.
using Slot = std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*, LayerPatterns*>;
// The same for reading.
using Value = std::variant<int64_t, double, bool, std::string, std::vector<std::string>, LayerPatterns>;

struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_in = true;
  bool high_in = true;

  bool holds(double v) const {  // false for NaN
    return std::isfinite(v) && (low_in ? v >= low : v > low) && (high_in ? v <= high : v < high);
  }
};

struct Key {
  std::string_view section;  // "" for the top level
  std::string_view name;
  Slot (*slot)(Config&);
  std::string_view doc;
  bool required = false;
  Range range = {};
  std::vector<std::string> choices = {};                                 // of a string, if not empty
  void (*check)(const std::string& value, std::string_view where) = {};  // of a string

  std::string full() const {
    return section.empty() ? std::string(name) : std::string(section) + "." + std::string(name);
  }
};

// Upper bounds keep products of two sizes within 64 bits; they are far beyond what a machine holds.
constexpr double kMany = 1e12;
constexpr double kWide = 1 << 24;

Range at_least(double low, double high = kMany) { return {low, high, true, true}; }
Range above(double low) { return {low, std::numeric_limits<double>::infinity(), false, true}; }
Range fraction() { return {0, 1, true, false}; }

void check_run_name(const std::string& value, std::string_view where) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  if (!value.empty() && value.size() <= 100 && value[0] != '.' && std::all_of(value.begin(), value.end(), good)) return;
  throw Error(ErrorKind::kUsage, "config",
              std::string(where) +
                  ": expected a name of letters, digits, '-', '_' and '.' that a folder can have, got \"" + value +
                  "\"");
}

void check_not_empty(const std::string& value, std::string_view where) {
  if (value.empty()) throw Error(ErrorKind::kUsage, "config", std::string(where) + ": must not be empty");
}

void check_layout(const std::string& value, std::string_view where) { parse_layout(value, where); }
void check_schedule(const std::string& value, std::string_view where) { parse_schedule(value, where); }

// Every key there is, in the order in which a configuration is written.
const std::vector<Key>& keys() {
#define ANNULUS_AT(member) [](Config& c) -> Slot { return &c.member; }
  static const std::vector<Key> table = {
      {"",
       "device",
       ANNULUS_AT(device),
       "where to compute; \"auto\" takes GPUs where the host has one per local rank",
       false,
       {},
       {"auto", "cpu", "cuda"}},
      {"", "timeout", ANNULUS_AT(timeout), "seconds until a communication that does not end is an error", false,
       above(0)},
      {"", "tf32", ANNULUS_AT(tf32), "on a GPU, multiply fp32 matrices with TF32's 10 bits of fraction instead of 23"},
      {"", "deterministic", ANNULUS_AT(deterministic),
       "on a GPU, the same bits from the same run every time, at some cost; on a CPU they always are"},
      {"",
       "cuda_graphs",
       ANNULUS_AT(cuda_graphs),
       "on GPUs, record a step once and replay it, where every step is alike: a context axis of one rank, no "
       "documents, "
       "no dropout, no adaptive pattern",
       false,
       {},
       {"auto", "off"}},

      {"run",
       "name",
       ANNULUS_AT(run.name),
       "runs are kept in FOLDER/NAME-001, -002, ...",
       false,
       {},
       {},
       check_run_name},
      {"run", "folder", ANNULUS_AT(run.folder), "where runs are kept", false, {}, {}, check_not_empty},
      {"run", "seed", ANNULUS_AT(run.seed), "of the weights and of the order of the text", false, at_least(0, 9e18)},
      {"run", "steps", ANNULUS_AT(run.steps), "optimizer steps of the whole run", true, at_least(1)},
      {"run", "log_every", ANNULUS_AT(run.log_every), "steps between two reports", false, at_least(1)},

      {"data", "train", ANNULUS_AT(data.train),
       "list of text files and globs (`**` goes into folders), or \"python-sources\"", true},
      {"data", "max_bytes", ANNULUS_AT(data.max_bytes), "use no more than the first bytes of the text; 0: all", false,
       at_least(0, 9e18)},
      {"data", "validation_fraction", ANNULUS_AT(data.validation_fraction),
       "share of the text, its tail, that is kept for validation", false, fraction()},
      {"data", "context", ANNULUS_AT(data.context), "tokens in a row (a sequence)", false,
       at_least(1, 1099511627776.0)},
      {"data", "batch", ANNULUS_AT(data.batch), "rows in a step, over all ranks", false, at_least(1, kWide)},
      {"data", "documents", ANNULUS_AT(data.documents),
       "every file is a document: a token sees its own document only, besides what model.pattern hides"},

      {"model", "layers", ANNULUS_AT(model.layers), "decoder layers", true, at_least(1, 100000)},
      {"model", "dim", ANNULUS_AT(model.dim), "width of the residual stream, a multiple of heads", true,
       at_least(2, kWide)},
      {"model", "heads", ANNULUS_AT(model.heads), "query heads, a multiple of kv_heads", true, at_least(1, kWide)},
      {"model", "kv_heads", ANNULUS_AT(model.kv_heads), "key/value heads; 0: as many as heads", false,
       at_least(0, kWide)},
      {"model", "ffn", ANNULUS_AT(model.ffn), "hidden width of SwiGLU; 0: 8/3 dim rounded up to a multiple of 64",
       false, at_least(0, kWide)},
      {"model", "vocab", ANNULUS_AT(model.vocab), "tokens; text is bytes, so 256 or more", false, at_least(256, kWide)},
      {"model",
       "dtype",
       ANNULUS_AT(model.dtype),
       "what the model computes in; with \"bf16\" the weights that are updated and saved are fp32 all the same",
       false,
       {},
       {"fp32", "bf16"}},
      {"model", "rope_theta", ANNULUS_AT(model.rope_theta), "base of the rotary embedding's wavelengths", false,
       above(0)},
      {"model", "tie_embeddings", ANNULUS_AT(model.tie_embeddings), "one matrix for the embedding and the output"},
      {"model", "norm_eps", ANNULUS_AT(model.norm_eps), "added to the mean square in RMSNorm", false, above(0)},
      {"model", "pattern", ANNULUS_AT(model.pattern),
       "which keys a query sees: an attention pattern, or a list of one for each layer"},
      {"model", "dropout", ANNULUS_AT(model.dropout), "share of attention probabilities that training drops", false,
       fraction()},
      {"model", "recompute", ANNULUS_AT(model.recompute),
       "keep less for the backward: norms, projections and the MLP are computed again there, attention never is"},

      {"optimizer", "lr", ANNULUS_AT(optimizer.lr), "highest learning rate", true, above(0)},
      {"optimizer",
       "min_lr_ratio",
       ANNULUS_AT(optimizer.min_lr_ratio),
       "last learning rate, as a share of lr",
       false,
       {0, 1, true, true}},
      {"optimizer", "warmup", ANNULUS_AT(optimizer.warmup), "steps over which the learning rate rises to lr", false,
       at_least(0)},
      {"optimizer", "weight_decay", ANNULUS_AT(optimizer.weight_decay), "of matrices", false, at_least(0)},
      {"optimizer", "beta1", ANNULUS_AT(optimizer.beta1), "AdamW's decay of the mean gradient", false, fraction()},
      {"optimizer", "beta2", ANNULUS_AT(optimizer.beta2), "AdamW's decay of the mean squared gradient", false,
       fraction()},
      {"optimizer", "eps", ANNULUS_AT(optimizer.eps), "AdamW's divisor is at least this", false, above(0)},
      {"optimizer", "clip", ANNULUS_AT(optimizer.clip), "highest global norm of the gradient; 0: no limit", false,
       at_least(0)},

      {"mesh", "data", ANNULUS_AT(mesh.data), "ranks along the axis that splits the batch", false,
       at_least(1, 1 << 20)},
      {"mesh", "context", ANNULUS_AT(mesh.context), "ranks along the axis that splits each sequence; 0: all others",
       false, at_least(0, 1 << 20)},

      {"attention",
       "layout",
       ANNULUS_AT(attention.layout),
       "which rank owns which positions of a sequence",
       false,
       {},
       {},
       check_layout},
      {"attention",
       "schedule",
       ANNULUS_AT(attention.schedule),
       "how keys and values travel; \"auto\" is group-cast where ranks need few rows of others, else ring",
       false,
       {},
       {},
       check_schedule},
      {"attention",
       "kernel",
       ANNULUS_AT(attention.kernel),
       "what computes a tile: \"reference\", \"aten\", \"efficient\", \"cudnn\", \"flash2\", \"flash3\"; \"auto\" "
       "chooses by "
       "capability",
       false,
       {},
       {},
       check_not_empty},
      {"attention", "even", ANNULUS_AT(attention.even),
       "refuse a context that does not give every rank the same share"},

      {"validation", "every", ANNULUS_AT(validation.every), "steps between two validations; 0: never", false,
       at_least(0)},
      {"validation", "batches", ANNULUS_AT(validation.batches), "batches in a validation, always the same ones", false,
       at_least(1)},

      {"checkpoint", "every", ANNULUS_AT(checkpoint.every), "steps between two checkpoints; 0: at the end alone", false,
       at_least(0)},
      {"checkpoint", "keep", ANNULUS_AT(checkpoint.keep), "newest checkpoints to keep", false, at_least(1, kWide)},
  };
#undef ANNULUS_AT
  return table;
}

const Key* find_key(std::string_view full) {
  for (const Key& key : keys()) {
    if (key.full() == full) return &key;
  }
  return nullptr;
}

Value value_of(const Key& key, const Config& config) {
  // The slot is only read through.
  return std::visit([](auto* at) -> Value { return *at; }, key.slot(const_cast<Config&>(config)));
}

// ---- writing

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u == 0x7f) {
      char hex[8];
      std::snprintf(hex, sizeof hex, "\\u%04X", u);
      out += hex;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// The shortest text that reads back as the same bits, and as a TOML float.
std::string number(double v) {
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, v).ptr;
  std::string out(text, end);
  if (out.find_first_of(".e") == std::string::npos) out += ".0";
  return out;
}

struct ToToml {
  std::string operator()(int64_t v) const { return std::to_string(v); }
  std::string operator()(double v) const { return number(v); }
  std::string operator()(bool v) const { return v ? "true" : "false"; }
  std::string operator()(const std::string& v) const { return quoted(v); }
  std::string operator()(const std::vector<std::string>& v) const {
    std::string out = "[";
    for (size_t i = 0; i < v.size(); ++i) out += (i ? ", " : "") + quoted(v[i]);
    return out + "]";
  }
  std::string operator()(const LayerPatterns& v) const { return v.text(); }
};

std::string value_text(const Key& key, const Config& config) { return std::visit(ToToml(), value_of(key, config)); }

// ---- reading

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
      return "a truth value";
    default:
      return "a date or time";
  }
}

// The value as the user wrote it, for messages; long ones are cut.
std::string shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& n) { out << n; });
  std::string text = out.str();
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string range_text(const Key& key, bool whole) {
  if (!key.choices.empty()) {
    std::string text = "one of ";
    for (size_t i = 0; i < key.choices.size(); ++i) text += (i ? ", \"" : "\"") + key.choices[i] + "\"";
    return text;
  }
  const Range& r = key.range;
  const auto show = [&](double v) {
    std::ostringstream out;
    out.precision(15);
    out << v;
    return out.str();
  };
  std::string text;
  if (std::isfinite(r.low)) text = (r.low_in ? (whole ? "" : "at least ") : "above ") + show(r.low);
  if (whole && std::isfinite(r.low)) text += r.high < kMany ? " to " + show(r.high) : " or more";
  if (!whole && r.high < kMany)
    text += std::string(text.empty() ? "" : ", ") + (r.high_in ? "at most " : "below ") + show(r.high);
  return text;
}

[[noreturn]] void refuse(const std::string& where, const std::string& message) {
  throw Error(ErrorKind::kUsage, "config", where + ": " + message);
}

// Puts a node's value into the configuration. `where`: "file:line: key".
class Reader {
 public:
  Reader(const Key& key, const toml::node& node, std::string where)
      : key_(key), node_(node), where_(std::move(where)) {}

  void operator()(int64_t* at) const {
    const auto value = node_.value_exact<int64_t>();
    if (!value) wrong_type("a whole number");
    if (!key_.range.holds(static_cast<double>(*value))) out_of_range(true);
    *at = *value;
  }
  void operator()(double* at) const {
    auto value = node_.value_exact<double>();
    if (const auto whole = node_.value_exact<int64_t>()) value = static_cast<double>(*whole);
    if (!value) wrong_type("a number");
    if (!key_.range.holds(*value)) out_of_range(false);
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
    if (!key_.choices.empty() && std::find(key_.choices.begin(), key_.choices.end(), *value) == key_.choices.end()) {
      const std::string near = nearest(*value, key_.choices);
      refuse(where_, "expected " + range_text(key_, false) + ", got \"" + *value + "\"" +
                         (near.empty() ? "" : "; did you mean \"" + near + "\"?"));
    }
    if (key_.check) key_.check(*value, where_);
    *at = *value;
  }
  void operator()(std::vector<std::string>* at) const {
    std::vector<std::string> values;
    if (const auto one = node_.value_exact<std::string>()) {
      values.push_back(*one);
    } else {
      const toml::array* list = node_.as_array();
      if (!list) wrong_type("a list of strings");
      for (const toml::node& element : *list) {
        const auto value = element.value_exact<std::string>();
        if (!value) {
          refuse(where_,
                 "expected a list of strings, got " + std::string(type_name(element)) + " in it: " + shown(element));
        }
        values.push_back(*value);
      }
    }
    if (values.empty()) refuse(where_, "expected at least one entry, got an empty list");
    for (const std::string& value : values) check_not_empty(value, where_);
    *at = std::move(values);
  }
  void operator()(LayerPatterns* at) const {
    if (const toml::table* table = node_.as_table()) {
      *at = pattern(*table, where_);
      return;
    }
    const toml::array* list = node_.as_array();
    const std::string expected = "a table such as { kind = \"causal\" }, or a list of one for each layer";
    if (!list) wrong_type(expected);
    if (list->empty()) refuse(where_, "expected " + expected + ", got an empty list");
    std::vector<PatternSpec> each;
    for (const toml::node& element : *list) {
      const std::string where = where_ + "[" + std::to_string(each.size()) + "]";
      const toml::table* table = element.as_table();
      if (!table) {
        refuse(where, "expected a table such as { kind = \"causal\" }, got " + std::string(type_name(element)) + ": " +
                          shown(element));
      }
      each.push_back(pattern(*table, where));
    }
    *at = std::move(each);
  }

 private:
  [[noreturn]] void wrong_type(const std::string& expected) const {
    refuse(where_, "expected " + expected + ", got " + std::string(type_name(node_)) + ": " + shown(node_));
  }
  static PatternSpec pattern(const toml::table& table, const std::string& where) {
    std::ostringstream text;
    // A table below a [section] header is written as lines otherwise.
    toml::table copy = table;
    copy.is_inline(true);
    text << copy;
    return parse_pattern(text.str(), where);
  }
  [[noreturn]] void out_of_range(bool whole) const {
    refuse(where_, "expected " + range_text(key_, whole) + ", got " + shown(node_));
  }

  const Key& key_;
  const toml::node& node_;
  std::string where_;
};

std::string known_instead(const std::string& full) {
  std::vector<std::string> names;
  for (const Key& key : keys()) names.push_back(key.full());
  const size_t dot = full.rfind('.');
  const std::string section = dot == std::string::npos ? "" : full.substr(0, dot);
  const std::string leaf = dot == std::string::npos ? full : full.substr(dot + 1);
  // First the same section, then the right name in another one, then anything near.
  std::vector<std::string> leaves;
  for (const Key& key : keys()) {
    if (key.section == section) leaves.emplace_back(key.name);
  }
  std::string near = nearest(leaf, leaves);
  if (!near.empty()) return "; did you mean \"" + (section.empty() ? "" : section + ".") + near + "\"?";
  for (const Key& key : keys()) {
    if (key.name == leaf) return "; did you mean \"" + key.full() + "\"?";
  }
  near = nearest(full, names);
  if (!near.empty()) return "; did you mean \"" + near + "\"?";
  std::string list;
  for (const std::string& name : leaves) list += (list.empty() ? "" : ", ") + name;
  if (list.empty()) return "";
  return section.empty() ? "" : "; [" + section + "] has: " + list;
}

std::string section_instead(const std::string& name) {
  std::vector<std::string> sections;
  std::string list;
  for (const Key& key : keys()) {
    if (key.section.empty() || std::find(sections.begin(), sections.end(), key.section) != sections.end()) continue;
    sections.emplace_back(key.section);
    list += (list.empty() ? "[" : ", [") + sections.back() + "]";
  }
  const std::string near = nearest(name, sections);
  return near.empty() ? "; there are " + list : "; did you mean [" + near + "]?";
}

bool is_section(std::string_view name) {
  return std::any_of(keys().begin(), keys().end(),
                     [&](const Key& key) { return !name.empty() && key.section == name; });
}

std::string place(const toml::node& node, std::string_view source) {
  const auto line = node.source().begin.line;
  return std::string(source) + (line ? ":" + std::to_string(line) : "");
}

// Applies all keys of a table; `seen` collects their full names.
void apply(const toml::table& table, std::string_view source, Config& config, std::set<std::string>& seen) {
  const auto apply_key = [&](const std::string& full, const toml::node& node) {
    const Key* key = find_key(full);
    const std::string where = place(node, source);
    if (!key) refuse(where, "unknown key \"" + full + "\"" + known_instead(full));
    std::visit(Reader(*key, node, where + ": " + full), key->slot(config));
    seen.insert(full);
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

toml::table parse_toml(std::string_view text, std::string_view source) {
  try {
    return toml::parse(text, source);
  } catch (const toml::parse_error& error) {
    throw Error(ErrorKind::kInput, "config",
                std::string(source) + ":" + std::to_string(error.source().begin.line) +
                    ": not TOML: " + std::string(error.description()));
  }
}

// One --set: `value` as TOML where it is that, and else as the string it is.
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
  toml::table table;
  const auto read = [&](const std::string& text) {
    try {
      table = toml::parse("value = " + text, std::string_view(source));
    } catch (const toml::parse_error&) {
      return false;
    }
    return table.size() == 1 && table.contains("value");
  };
  const bool wants_string = std::holds_alternative<std::string*>(key->slot(config));
  // A string may look like a number: --set run.name=7.
  if (!read(value) || (wants_string && !table.get("value")->is_string())) {
    if (!read(quoted(value))) refuse(source, "expected text in UTF-8");
  }
  std::visit(Reader(*key, *table.get("value"), "--set " + full), key->slot(config));
  seen.insert(full);
}

bool has_documents(const PatternSpec& spec) {
  return !spec.documents.empty() || std::any_of(spec.members.begin(), spec.members.end(), has_documents);
}

void check_together(const Config& c, std::string_view source) {
  const auto fail = [&](const std::string& message) { refuse(std::string(source), message); };
  const ModelSection& m = c.model;
  if (m.heads % m.kv_heads != 0) {
    fail("model.heads = " + std::to_string(m.heads) + " query heads cannot share model.kv_heads = " +
         std::to_string(m.kv_heads) + ": heads must be a multiple of kv_heads");
  }
  if (m.dim % m.heads != 0) {
    const int64_t below = std::max<int64_t>(1, m.dim / m.heads) * m.heads;
    fail("model.dim = " + std::to_string(m.dim) + " cannot be split over model.heads = " + std::to_string(m.heads) +
         ": dim must be a multiple of heads, for example " + std::to_string(below));
  }
  if ((m.dim / m.heads) % 2 != 0) {
    fail("model.dim / model.heads = " + std::to_string(m.dim / m.heads) +
         " must be even: the rotary embedding turns pairs of numbers");
  }
  const auto given = static_cast<int64_t>(m.pattern.each.size());
  if (given != 0 && given != m.layers) {
    fail("model.pattern lists " + std::to_string(given) + " patterns for model.layers = " + std::to_string(m.layers) +
         ": expected one for each layer, or a single table for all");
  }
  if (c.data.documents) {
    for (int64_t i = 0; i < std::max<int64_t>(1, given); ++i) {
      if (!has_documents(m.pattern.of(i))) continue;
      fail(
          "data.documents = true takes the documents from the files, but model.pattern has documents of its own: "
          "leave one of them out");
    }
  }
  if (c.data.batch % c.mesh.data != 0) {
    fail("data.batch = " + std::to_string(c.data.batch) + " rows cannot be split over mesh.data = " +
         std::to_string(c.mesh.data) + " ranks: batch must be a multiple of it");
  }
}

std::string read_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    throw Error(ErrorKind::kInput, "config", path + ": there is no such file");
  }
  if (!std::filesystem::is_regular_file(path, error)) {
    throw Error(ErrorKind::kInput, "config", path + ": expected a TOML file, found something else");
  }
  constexpr uintmax_t kLargest = 16 << 20;
  if (std::filesystem::file_size(path, error) > kLargest) {
    throw Error(ErrorKind::kInput, "config", path + ": more than 16 MiB, this is no configuration");
  }
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) throw Error(ErrorKind::kInput, "config", path + ": cannot be read: " + std::strerror(errno));
  return text.str();
}

}  // namespace

std::string LayerPatterns::text() const {
  if (each.empty()) return all.text();
  std::string text;
  for (const PatternSpec& spec : each) text += (text.empty() ? "[" : ", ") + spec.text();
  return text + "]";
}

Config parse_config(std::string_view text, std::string_view source, const std::vector<std::string>& sets) {
  Config config;
  std::set<std::string> seen;
  apply(parse_toml(text, source), source, config, seen);
  for (const std::string& set : sets) apply_set(set, config, seen);
  std::string missing;
  for (const Key& key : keys()) {
    if (key.required && !seen.contains(key.full())) {
      missing += "\n  " + key.full() + ": " + std::string(key.doc);
    }
  }
  if (!missing.empty()) refuse(std::string(source), "these keys are needed and missing:" + missing);
  ModelSection& m = config.model;
  if (m.kv_heads == 0) m.kv_heads = m.heads;
  if (m.ffn == 0) m.ffn = (8 * m.dim + 3 * 64 - 1) / (3 * 64) * 64;
  check_together(config, source);
  return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& sets) {
  return parse_config(read_file(path), path, sets);
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

std::vector<std::string> flatten(const Config& config) {
  std::vector<std::string> lines;
  for (const Key& key : keys()) lines.push_back(key.full() + " = " + value_text(key, config));
  return lines;
}

std::string config_reference() {
  const Config defaults;
  std::string out = "| key | default | values | meaning |\n|---|---|---|---|\n";
  for (const Key& key : keys()) {
    const Value value = value_of(key, defaults);
    const bool whole = std::holds_alternative<int64_t>(value);
    std::string range = range_text(key, whole);
    if (std::holds_alternative<bool>(value)) range = "true, false";
    out += "| `" + key.full() + "` | " + (key.required ? "required" : "`" + value_text(key, defaults) + "`") + " | " +
           range + " | " + std::string(key.doc) + " |\n";
  }
  return out;
}

}  // namespace annulus
