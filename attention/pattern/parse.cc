// Reads patterns from TOML (parse_pattern in pattern.h). Tables say which keys each kind and each block map takes, and
// the messages about unknown or missing keys follow from them. checks.cc says which values are valid.
#include <algorithm>
#include <array>
#include <iterator>

#include "attention/pattern/checks.h"
#include "attention/pattern/pattern.h"
#include "attention/pattern/spec_names.h"
#include "common/error.h"
#include "common/names.h"
#include "common/toml.h"

namespace annulus {
namespace {

[[noreturn]] void refuse(const std::string& where, const std::string& message) {
  throw Error(ErrorKind::kUsage, "pattern", where + ": " + message);
}

// The index of `got` in `known`. `what` says in the message what kind of name it is.
size_t index_of(const std::string& got, const std::vector<std::string>& known, const std::string& what,
                const std::string& where) {
  const auto it = std::find(known.begin(), known.end(), got);
  if (it == known.end()) refuse(where, "unknown " + what + " \"" + got + "\"" + suggestion(got, known));
  return static_cast<size_t>(it - known.begin());
}

// The value of one key.
struct Value {
  const toml::node& node;
  std::string where;
  std::string key;
  int depth = 0;  // of the pattern that has the key: how many unions are around it

  [[noreturn]] void refuse(const std::string& message) const {
    annulus::refuse(where, "\"" + key + "\" must be " + message);
  }
  Value of(const toml::node& part) const { return {part, where, key, depth}; }

  int64_t whole() const {
    const auto value = node.value_exact<int64_t>();
    if (!value) refuse("a whole number");
    return *value;
  }
  bool truth() const {
    const auto value = node.value_exact<bool>();
    if (!value) refuse("true or false");
    return *value;
  }
  std::string text() const {
    const auto value = node.value_exact<std::string>();
    if (!value) refuse("a string in quotes");
    return *value;
  }
  const toml::array& list(const std::string& what) const {
    const toml::array* array = node.as_array();
    if (!array) refuse(what);
    return *array;
  }
  std::vector<int64_t> wholes() const {
    std::vector<int64_t> values;
    for (const toml::node& part : list("a list of whole numbers")) {
      if (!part.is_integer()) refuse("a list of whole numbers");
      values.push_back(part.value_or(int64_t{0}));
    }
    return values;
  }
  // The enumerator that the value names. Only the first `known` names are accepted.
  template <typename Enum, size_t N>
  Enum name(const std::array<std::string_view, N>& names, size_t known = N) const {
    const std::string got = text();
    return static_cast<Enum>(index_of(got, {names.begin(), names.begin() + static_cast<ptrdiff_t>(known)}, key, where));
  }
};

struct Key {
  std::string name;
  bool required = false;
  void (*read)(const Value& value, PatternSpec& spec) = nullptr;
};

PatternSpec read_pattern(const toml::table& table, const std::string& where, int depth);

// One list of `numbers` for all batch rows, or one for each of them.
std::vector<std::vector<int64_t>> read_lists(const Value& value, const std::string& numbers, const char* example) {
  const std::string what =
      "a list of " + numbers + "s for all batch rows, as in " + example + ", or a list of such lists, one for each";
  const toml::array& list = value.list(what);
  std::vector<std::vector<int64_t>> rows;
  if (!list.empty() && list.front().is_array()) {
    for (const toml::node& row : list) {
      if (!row.is_array()) value.refuse(what);
      rows.push_back(value.of(row).wholes());
    }
  } else {
    rows.push_back(value.wholes());
  }
  for (const std::vector<int64_t>& row : rows) {
    if (row.empty()) value.refuse(what + ", each of at least one " + numbers);
  }
  return rows;
}

std::vector<std::vector<int64_t>> read_documents(const Value& value) {
  return read_lists(value, "length", "[700, 1348]");
}

std::vector<std::vector<Span>> read_kept_keys(const Value& value) {
  const std::string what =
      "a list of [begin, end) for all batch rows, as in [[0, 700], [750, 900]], or a list of such "
      "lists, one for each";
  const auto is_range = [](const toml::node& node) {
    const toml::array* range = node.as_array();
    return range && !range->empty() && range->front().is_integer();
  };
  const auto ranges = [&](const toml::node& node) {
    std::vector<Span> kept;
    for (const toml::node& part : value.of(node).list(what)) {
      const std::vector<int64_t> ends = is_range(part) ? value.of(part).wholes() : std::vector<int64_t>();
      if (ends.size() != 2 || ends[1] <= ends[0]) value.refuse(what);
      kept.push_back(Span::range(ends[0], ends[1]));
    }
    return kept;
  };
  const toml::array& list = value.list(what);
  if (list.empty() || std::any_of(list.begin(), list.end(), is_range)) return {ranges(list)};
  std::vector<std::vector<Span>> rows;
  for (const toml::node& row : list) rows.push_back(ranges(row));
  return rows;
}

Slice read_slice(const toml::table& table, const std::string& where) {
  const std::vector<std::string> known = {"queries", "keys", "heads", "batch", "lo", "hi"};
  Slice slice{kEverything, kEverything, {}, {}, {}};
  for (const auto& [key, node] : table) {
    const Value value{node, where, std::string(key.str())};
    if (std::find(known.begin(), known.end(), value.key) == known.end()) {
      refuse(where, "a slice has no key \"" + value.key + "\"" + suggestion(value.key, known));
    }
    if (value.key == "lo" || value.key == "hi") {
      int64_t& side = value.key == "lo" ? slice.band.lo : slice.band.hi;
      side = std::clamp(value.whole(), -Band::kUnbounded, Band::kUnbounded);
      continue;
    }
    const std::vector<int64_t> numbers = value.wholes();
    if (numbers.size() != 3) value.refuse("[begin, stride, count]");
    const Span span{numbers[0], numbers[1], numbers[2]};
    (value.key == "queries" ? slice.queries
     : value.key == "keys"  ? slice.keys
     : value.key == "heads" ? slice.heads
                            : slice.batch) = span;
  }
  for (const char* needed : {"queries", "keys"}) {
    if (!table.contains(needed)) {
      refuse(where, "a slice needs \"queries\" and \"keys\", each [begin, stride, count]; \"" + std::string(needed) +
                        "\" is missing");
    }
  }
  return slice;
}

void read_levels(const Value& value, PatternSpec& spec) {
  const std::string what = "a list of [stride, reach] in blocks, as in [[1, 2], [4, 16]]";
  for (const toml::node& part : value.list(what)) {
    if (!part.is_array()) value.refuse(what);
    const std::vector<int64_t> numbers = value.of(part).wholes();
    if (numbers.size() != 2) value.refuse(what);
    spec.blocks.levels.push_back({numbers[0], numbers[1]});
  }
}

void read_members(const Value& value, PatternSpec& spec) {
  const std::string what = "a list of patterns, as in [{ kind = \"causal\" }, { kind = \"full\" }]";
  for (const toml::node& part : value.list(what)) {
    if (!part.is_table()) value.refuse(what);
    spec.members.push_back(read_pattern(
        *part.as_table(), value.where + ", member " + std::to_string(spec.members.size() + 1), value.depth + 1));
  }
}

void read_slices(const Value& value, PatternSpec& spec) {
  const std::string what = "a list of slices, as in [{ queries = [0, 1, 64], keys = [0, 1, 64] }]";
  for (const toml::node& part : value.list(what)) {
    if (!part.is_table()) value.refuse(what);
    spec.slices.push_back(
        read_slice(*part.as_table(), value.where + ", slice " + std::to_string(spec.slices.size() + 1)));
  }
}

// The keys that every kind takes.
const std::vector<Key>& common_keys() {
  static const std::vector<Key> keys = {
      {"causal", false, [](const Value& v, PatternSpec& s) { s.causal = v.truth(); }},
      {"documents", false, [](const Value& v, PatternSpec& s) { s.documents = read_documents(v); }},
      {"key_documents", false, [](const Value& v, PatternSpec& s) { s.key_documents = read_documents(v); }},
      {"kept_keys", false, [](const Value& v, PatternSpec& s) { s.kept_keys = read_kept_keys(v); }},
      {"mask", false, [](const Value& v, PatternSpec& s) { s.mask.file = v.text(); }},
      {"mask_digest", false, [](const Value& v, PatternSpec& s) { s.mask.digest = v.text(); }},
  };
  return keys;
}

struct KindName {
  PatternSpec::Kind kind;
  std::string name;
  std::vector<Key> keys;
};

const std::vector<KindName>& kinds() {
  using Kind = PatternSpec::Kind;
  static const std::vector<KindName> table = {
      {Kind::kFull, "full", {}},
      {Kind::kFull, "causal", {}},
      {Kind::kWindow,
       "window",
       {{"left", true, [](const Value& v, PatternSpec& s) { s.left = v.whole(); }},
        {"right", true, [](const Value& v, PatternSpec& s) { s.right = v.whole(); }},
        {"sink_tokens", false, [](const Value& v, PatternSpec& s) { s.sink_tokens = v.whole(); }}}},
      {Kind::kDilated,
       "dilated",
       {{"segment_lengths", true, [](const Value& v, PatternSpec& s) { s.dilated.segment_lengths = v.wholes(); }},
        {"dilation_rates", true, [](const Value& v, PatternSpec& s) { s.dilated.dilation_rates = v.wholes(); }},
        {"offsets", false,
         [](const Value& v, PatternSpec& s) { s.dilated.offsets = v.name<DilatedSpec::Offsets>(kOffsetsNames); }},
        {"combine", false,
         [](const Value& v, PatternSpec& s) { s.dilated.combine = v.name<DilatedSpec::Combine>(kCombineNames); }},
        {"equal_segments", false, [](const Value& v, PatternSpec& s) { s.dilated.equal_segments = v.truth(); }}}},
      {Kind::kBlocks,
       "blocks",
       {// The last name, "given", stands for maps made by programs and cannot be written.
        {"map", true,
         [](const Value& v, PatternSpec& s) {
           s.blocks.map = v.name<BlocksSpec::Map>(kMapNames, kMapNames.size() - 1);
         }},
        {"block", false, [](const Value& v, PatternSpec& s) { s.blocks.block = v.whole(); }}}},
      {Kind::kFull, "documents", {}},
      {Kind::kTree,
       "tree",
       {{"lengths", true, [](const Value& v, PatternSpec& s) { s.tree.lengths = read_documents(v); }},
        {"parents", true,
         [](const Value& v, PatternSpec& s) { s.tree.parents = read_lists(v, "parent", "[-1, 0, 0]"); }}}},
      {Kind::kFull, "mask", {}},
      {Kind::kUnion, "union", {{"of", true, read_members}}},
      {Kind::kSlices, "slices", {{"slices", true, read_slices}}},
  };
  return table;
}

// The further keys that each map of the kind "blocks" takes.
const std::vector<Key>& map_keys(BlocksSpec::Map map) {
  static const Key window = {"window_blocks", true,
                             [](const Value& v, PatternSpec& s) { s.blocks.window_blocks = v.whole(); }};
  static const Key rate = {"rate", true, [](const Value& v, PatternSpec& s) { s.blocks.rate = v.whole(); }};
  static const Key global = {"global_blocks", true,
                             [](const Value& v, PatternSpec& s) { s.blocks.global_blocks = v.whole(); }};
  static const Key random = {"random_blocks", true,
                             [](const Value& v, PatternSpec& s) { s.blocks.random_blocks = v.whole(); }};
  static const Key seed = {"seed", false, [](const Value& v, PatternSpec& s) { s.blocks.seed = v.whole(); }};
  static const Key per_head = {"per_head", false,
                               [](const Value& v, PatternSpec& s) { s.blocks.per_head = v.truth(); }};
  static const Key stride = {"stride", true, [](const Value& v, PatternSpec& s) { s.blocks.stride = v.whole(); }};
  static const Key levels = {"levels", true, read_levels};
  static const Key keep = {"keep", true, [](const Value& v, PatternSpec& s) { s.blocks.keep = v.whole(); }};
  static const Key query = {
      "query", false, [](const Value& v, PatternSpec& s) { s.blocks.query = v.name<BlocksSpec::Query>(kQueryNames); }};
  static const Key file = {"file", true, [](const Value& v, PatternSpec& s) { s.blocks.file = v.text(); }};
  static const Key digest = {"digest", false, [](const Value& v, PatternSpec& s) { s.blocks.digest = v.text(); }};
  static const std::array<std::vector<Key>, kMapNames.size()> table = {{
      {window},
      {window, rate},
      {global, window},
      {window, global, random, seed, per_head},
      {window, stride},
      {levels},
      {keep, query},
      {file, digest},
      {},
  }};
  return table[static_cast<size_t>(map)];
}

// Reads `keys` from the table. `title` names what they belong to in messages, such as kind "window".
void read_keys(const toml::table& table, const std::vector<Key>& keys, const std::string& title,
               const std::string& where, int depth, PatternSpec& spec) {
  for (const Key& key : keys) {
    if (const toml::node* node = table.get(key.name)) {
      key.read({*node, where, key.name, depth}, spec);
    } else if (key.required) {
      std::string needed;
      for (const Key& k : keys) {
        if (k.required) needed += (needed.empty() ? "\"" : " and \"") + k.name + "\"";
      }
      refuse(where, title + " needs " + needed + "; \"" + key.name + "\" is missing");
    }
  }
}

PatternSpec read_pattern(const toml::table& table, const std::string& where, int depth) {
  if (depth > kDeepest) refuse(where, "unions may be nested " + std::to_string(kDeepest) + " deep, but not deeper");
  const auto kind_name = table["kind"].value_exact<std::string>();
  if (!kind_name) refuse(where, "expected kind = \"...\", as in { kind = \"causal\" }");
  const std::vector<std::string> names = names_of(kinds());
  // Writing a map's name as the kind is the likeliest mistake, and no kind has a similar name that could be suggested.
  if (std::find(kMapNames.begin(), kMapNames.end(), *kind_name) != kMapNames.end() &&
      std::find(names.begin(), names.end(), *kind_name) == names.end()) {
    refuse(where, "unknown kind \"" + *kind_name + "\"; it is a map of blocks: write { kind = \"blocks\", map = \"" +
                      *kind_name + "\", ... }");
  }
  const KindName& kind = kinds()[index_of(*kind_name, names, "kind", where)];

  PatternSpec spec;
  spec.kind = kind.kind;
  std::string title = "kind \"" + kind.name + "\"";
  std::vector<Key> keys = kind.keys;
  if (spec.kind == PatternSpec::Kind::kBlocks) {
    read_keys(table, kind.keys, title, where, depth, spec);  // reads which map it is
    const std::vector<Key>& more = map_keys(spec.blocks.map);
    keys.insert(keys.end(), more.begin(), more.end());
    title = "map \"" + std::string(kMapNames[static_cast<size_t>(spec.blocks.map)]) + "\"";
  }
  keys.insert(keys.end(), common_keys().begin(), common_keys().end());
  std::vector<std::string> known = {"kind"};
  for (Key& key : keys) {
    if (key.name == kind.name && key.name != "causal") key.required = true;  // kinds "documents" and "mask"
    known.push_back(key.name);
  }
  for (const auto& [key, value] : table) {
    const std::string name(key.str());
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      refuse(where, title + " has no key \"" + name + "\"" + suggestion(name, known));
    }
  }
  read_keys(table, keys, title, where, depth, spec);
  if (kind.name == "causal") {
    if (table.contains("causal") && !spec.causal) {
      refuse(where, "kind \"causal\" cannot have causal = false; use kind = \"full\"");
    }
    spec.causal = true;
  }
  return spec;
}

// Gives what text() writes alike one form: a window that ends with the query, and a tree, are causal by themselves, and
// a window without bounds is the kind that it equals. Members of unions, too.
void normalize(PatternSpec& spec) {
  for (PatternSpec& member : spec.members) normalize(member);
  if (spec.kind == PatternSpec::Kind::kTree) spec.causal = false;
  if (spec.kind != PatternSpec::Kind::kWindow) return;
  const bool past = ends_with_query(spec);
  if (spec.left == PatternSpec::kOpen && (past || spec.right == PatternSpec::kOpen)) {
    spec.kind = PatternSpec::Kind::kFull;
    spec.causal = past;
    spec.left = spec.right = spec.sink_tokens = 0;
  } else if (spec.right == 0) {
    spec.causal = false;
  }
}

}  // namespace

std::string pattern_kinds() { return alternatives(names_of(kinds())); }

PatternSpec parse_pattern(std::string_view toml_text, std::string_view where) {
  const std::string place(where);
  const std::string expected =
      "expected an inline table such as { kind = \"causal\" }, got '" + std::string(toml_text) + "'";
  toml::table document;
  try {
    document = parse_toml("pattern = " + std::string(toml_text));
  } catch (const TomlFault& fault) {
    refuse(place, expected + ": " + fault.what());
  }
  const toml::table* table = document["pattern"].as_table();
  if (!table || document.size() != 1) refuse(place, expected);
  PatternSpec spec = read_pattern(*table, place, 0);
  if (const std::string fault = fault_of(spec); !fault.empty()) refuse(place, fault);
  normalize(spec);
  return spec;
}

}  // namespace annulus
