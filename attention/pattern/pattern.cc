// See pattern.h.
#include "attention/pattern/pattern.h"

#include <toml++/toml.h>

#include <algorithm>

#include "common/error.h"
#include "common/names.h"

namespace annulus {
namespace {

constexpr int64_t kLongest = int64_t{1} << 40;

// What may follow `kind =`.
struct KindName {
  PatternSpec::Kind kind;
  std::string_view name;
  std::vector<std::string> keys;  // besides kind and causal
  bool causal = false;            // the name says so already
};

const std::vector<KindName>& kinds() {
  static const std::vector<KindName> table = {
      {PatternSpec::Kind::kFull, "full", {}},
      {PatternSpec::Kind::kFull, "causal", {}, true},
      {PatternSpec::Kind::kWindow, "window", {"left", "right"}},
  };
  return table;
}

[[noreturn]] void refuse(std::string_view where, const std::string& message) {
  throw Error(ErrorKind::kUsage, "pattern", std::string(where) + ": " + message);
}

int64_t reach(const toml::table& table, const std::string& key, std::string_view where) {
  const toml::node* node = table.get(key);
  if (!node) refuse(where, "a window needs \"left\" and \"right\", both counted in keys; \"" + key + "\" is missing");
  const auto value = node->value_exact<int64_t>();
  if (!value) refuse(where, "\"" + key + "\" must be a whole number of keys");
  if (*value < 0 || *value > kLongest) {
    refuse(where, "\"" + key + "\" must be between 0 and 2^40, got " + std::to_string(*value));
  }
  return *value;
}

}  // namespace

void validate(const AttentionShape& s) {
  const auto fail = [](const std::string& message) { throw Error(ErrorKind::kPlan, "pattern", message); };
  if (s.batch < 0 || s.q_len < 0 || s.k_len < 0 || s.heads < 1 || s.kv_heads < 1) {
    fail("expected batch and lengths of at least 0 and heads of at least 1, got batch " + std::to_string(s.batch) +
         ", " + std::to_string(s.q_len) + " queries, " + std::to_string(s.k_len) + " keys, " + std::to_string(s.heads) +
         " query heads, " + std::to_string(s.kv_heads) + " kv heads");
  }
  if (s.heads % s.kv_heads != 0) {
    fail(std::to_string(s.heads) + " query heads cannot share " + std::to_string(s.kv_heads) +
         " kv heads: the query heads must be a multiple of the kv heads");
  }
  if (s.q_len > kLongest || s.k_len > kLongest || s.query_offset > kLongest || s.query_offset < -kLongest) {
    fail("lengths and the query offset must be at most 2^40");
  }
}

std::string PatternSpec::text() const {
  switch (kind) {
    case Kind::kFull:
      return causal ? "{ kind = \"causal\" }" : "{ kind = \"full\" }";
    case Kind::kWindow:
      return "{ kind = \"window\", left = " + std::to_string(left) + ", right = " + std::to_string(right) +
             (causal ? ", causal = true }" : " }");
  }
  return "";
}

PatternSpec parse_pattern(std::string_view toml_text, std::string_view where) {
  toml::table document;
  try {
    document = toml::parse("pattern = " + std::string(toml_text), std::string_view("pattern"));
  } catch (const toml::parse_error& error) {
    refuse(where, "expected an inline table such as { kind = \"causal\" }, got '" + std::string(toml_text) +
                      "': " + std::string(error.description()));
  }
  const toml::table* table = document["pattern"].as_table();
  if (!table || document.size() != 1) {
    refuse(where, "expected an inline table such as { kind = \"causal\" }, got '" + std::string(toml_text) + "'");
  }
  const auto kind_name = (*table)["kind"].value_exact<std::string>();
  if (!kind_name) refuse(where, "expected kind = \"...\", as in { kind = \"causal\" }");
  std::vector<std::string> names;
  const KindName* found = nullptr;
  for (const KindName& k : kinds()) {
    names.emplace_back(k.name);
    if (k.name == *kind_name) found = &k;
  }
  if (!found) refuse(where, "unknown kind \"" + *kind_name + "\"" + suggestion(*kind_name, names));

  std::vector<std::string> known = found->keys;
  known.insert(known.begin(), {"kind", "causal"});
  for (const auto& [key, value] : *table) {
    const std::string name(key.str());
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      refuse(where, "kind \"" + *kind_name + "\" has no key \"" + name + "\"" + suggestion(name, known));
    }
  }
  PatternSpec spec;
  spec.kind = found->kind;
  spec.causal = found->causal;
  if (const toml::node* node = table->get("causal")) {
    const auto value = node->value_exact<bool>();
    if (!value) refuse(where, "\"causal\" must be true or false");
    if (spec.causal && !*value) refuse(where, "kind \"causal\" cannot have causal = false; use kind = \"full\"");
    spec.causal = *value;
  }
  if (spec.kind == PatternSpec::Kind::kWindow) {
    spec.left = reach(*table, "left", where);
    spec.right = reach(*table, "right", where);
  }
  return spec;
}

Pattern make_pattern(const PatternSpec& spec, const AttentionShape& shape) {
  validate(shape);
  // Bands are over indices: key j - query index i = (key position - query position) + query_offset.
  Band band;
  if (spec.kind == PatternSpec::Kind::kWindow) band = {shape.query_offset - spec.left, shape.query_offset + spec.right};
  if (spec.causal) band.hi = std::min(band.hi, shape.query_offset);
  Pattern pattern{shape, {}};
  if (shape.batch > 0 && shape.q_len > 0 && shape.k_len > 0) {
    pattern.slices.push_back({Span::range(0, shape.batch), Span::range(0, shape.heads), Span::range(0, shape.q_len),
                              Span::range(0, shape.k_len), band});
  }
  return pattern;
}

}  // namespace annulus
