// Reads and writes profiles of machines: parse_machine and Machine::text of machine.h.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "attention/plan/machine.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "common/toml.h"

namespace annulus {
namespace {

// What a figure may be. The bounds leave room for any machine there is or will be soon; what lies outside is a figure
// in the wrong unit.
struct Figure {
  double least, most;
  const char* what;
};
constexpr Figure kSeconds = {0, 60, "seconds, from 0 to 60, such as 5e-6"};
constexpr Figure kBandwidth = {1e3, 1e15, "bytes a second, from 1e3 to 1e15, such as 45e9"};
constexpr Figure kEdge = {0, 1e5, "pairs, from 0 to 1e5: about half of a kernel's block of keys, such as 64"};
constexpr Figure kRate = {1e3, 1e18,
                          "pairs x head size a second, from 1e3 to 1e18: a quarter of the forward's FLOP/s, a tenth of "
                          "the backward's"};

// One table of a profile. Each key that is read is remembered, so that end() can refuse the others.
class Table {
 public:
  Table(const toml::table& table, std::string where, std::string path)
      : table_(table), where_(std::move(where)), path_(std::move(path)) {}

  [[noreturn]] void refuse(const std::string& key, const std::string& message) const {
    throw Error(ErrorKind::kUsage, "machine", where_ + ": \"" + path_ + key + "\" " + message);
  }
  [[noreturn]] void refuse_value(const std::string& key, const std::string& expected, const toml::node& got) const {
    std::ostringstream text;
    got.visit([&](const auto& value) { text << value; });
    refuse(key, "should be " + expected + ", but is " + printable(text.str(), 60));
  }

  const toml::node* find(const std::string& key) {
    known_.push_back(key);
    return table_.get(key);
  }
  const toml::node& need(const std::string& key, const std::string& expected) {
    if (const toml::node* const node = find(key)) return *node;
    refuse(key, "is missing: expected " + expected);
  }

  std::string text(const std::string& key) {
    const toml::node& node = need(key, "a string in quotes");
    const auto value = node.value_exact<std::string>();
    if (!value || value->empty()) refuse_value(key, "a string in quotes, not empty", node);
    return *value;
  }
  double number(const std::string& key, const Figure& figure, std::optional<double> without = {}) {
    const toml::node* const node = without ? find(key) : &need(key, figure.what);
    return node == nullptr ? *without : number_of(*node, key, figure);
  }
  int64_t whole(const std::string& key, int64_t least, int64_t most, int64_t without) {
    const toml::node* const node = find(key);
    if (node == nullptr) return without;
    const auto value = node->value_exact<int64_t>();
    if (!value || *value < least || *value > most) {
      refuse_value(key, "a whole number from " + std::to_string(least) + " to " + std::to_string(most), *node);
    }
    return *value;
  }
  bool truth(const std::string& key) {
    const toml::node& node = need(key, "true or false");
    const auto value = node.value_exact<bool>();
    if (!value) refuse_value(key, "true or false", node);
    return *value;
  }
  double bytes(const std::string& key) {
    const toml::node* const node = find(key);
    if (node == nullptr) return 0;
    const auto text = node->value_exact<std::string>();
    const auto value = text ? bytes_of_text(*text) : std::nullopt;
    if (!value || *value < (1 << 20))
      refuse_value(key, "an amount of memory of at least 1MiB, such as \"80GB\"", *node);
    return static_cast<double>(*value);
  }
  std::vector<int64_t> lengths(const std::string& key) {
    const std::string expected = "ascending lengths of at least 1, such as [128, 1024, 8192]";
    const toml::node& node = need(key, expected);
    const toml::array* const list = node.as_array();
    if (list == nullptr || list->empty()) refuse_value(key, expected, node);
    std::vector<int64_t> lengths;
    for (const toml::node& part : *list) {
      const auto value = part.value_exact<int64_t>();
      if (!value || *value < 1 || (!lengths.empty() && *value <= lengths.back())) refuse_value(key, expected, node);
      lengths.push_back(*value);
    }
    return lengths;
  }
  std::vector<std::vector<double>> rates(const std::string& key, size_t rows, size_t keys) {
    const std::string expected = counted(static_cast<int64_t>(rows), "list") + " of " +
                                 counted(static_cast<int64_t>(keys), "rate") + " each, one for each of rows and keys";
    const toml::node& node = need(key, expected);
    const toml::array* const list = node.as_array();
    if (list == nullptr || list->size() != rows) refuse_value(key, expected, node);
    std::vector<std::vector<double>> all;
    for (const toml::node& row : *list) {
      const toml::array* const of_row = row.as_array();
      if (of_row == nullptr || of_row->size() != keys) refuse_value(key, expected, node);
      all.emplace_back();
      for (const toml::node& rate : *of_row) all.back().push_back(number_of(rate, key, kRate));
    }
    return all;
  }
  std::optional<Table> table(const std::string& key) {
    const toml::node* const node = find(key);
    if (node == nullptr) return std::nullopt;
    if (!node->is_table()) refuse_value(key, "a table, [" + path_ + key + "]", *node);
    return Table(*node->as_table(), where_, path_ + key + ".");
  }
  Table need_table(const std::string& key, const std::string& what) {
    if (std::optional<Table> found = table(key)) return std::move(*found);
    refuse(key, "is missing: expected a table [" + path_ + key + "] with " + what);
  }

  // Refuses keys that were not asked for.
  void end() const {
    for (const auto& [key, node] : table_) {
      const std::string name(key.str());
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      refuse(name, "is no key of a machine's profile" + did_you_mean(name, known_) +
                       " (known here: " + join(known_, ", ") + ")");
    }
  }

 private:
  double number_of(const toml::node& node, const std::string& key, const Figure& figure) const {
    const auto value = node.is_number() ? node.value<double>() : std::nullopt;
    if (!value || !(*value >= figure.least && *value <= figure.most)) refuse_value(key, figure.what, node);
    return *value;
  }

  const toml::table& table_;
  const std::string where_, path_;
  std::vector<std::string> known_;
};

KernelRate read_rate(Table table) {
  KernelRate rate;
  rate.call = table.number("call", kSeconds, 0.0);
  rate.tile = table.number("tile", kSeconds, 0.0);
  rate.edge = table.number("edge", kEdge, 0.0);
  rate.rows = table.lengths("rows");
  rate.keys = table.lengths("keys");
  rate.rates = table.rates("rates", rate.rows.size(), rate.keys.size());
  table.end();
  return rate;
}

std::optional<KernelRates> read_rates(std::optional<Table> table) {
  if (!table) return std::nullopt;
  const char* const what = "rows, keys and rates of the kernel";
  KernelRates rates{read_rate(table->need_table("forward", what)), read_rate(table->need_table("backward", what))};
  table->end();
  return rates;
}

LinkProfile read_link(Table table) {
  LinkProfile link;
  link.latency = table.number("latency", kSeconds);
  link.message = table.number("message", kSeconds, 0.0);
  link.bandwidth = table.number("bandwidth", kBandwidth);
  link.shared_by = static_cast<int>(table.whole("shared_by", 1, 1 << 20, 1));
  table.end();
  return link;
}

std::string text_of(const std::string& name, const KernelRate& rate) {
  const auto lengths = [](const std::vector<int64_t>& list) { return list_text(std::span<const int64_t>(list)); };
  const auto row = [](const std::vector<double>& rates) { return list_text(rates, toml_number); };
  return "\n[kernel." + name + "]\ncall = " + toml_number(rate.call) + "\ntile = " + toml_number(rate.tile) +
         "\nedge = " + toml_number(rate.edge) + "\nrows = " + lengths(rate.rows) + "\nkeys = " + lengths(rate.keys) +
         "\nrates = " + list_text(rate.rates, row) + "\n";
}

std::string text_of(const std::string& name, const LinkProfile& link) {
  return "\n[" + name + "]\nlatency = " + toml_number(link.latency) + "\nmessage = " + toml_number(link.message) +
         "\nbandwidth = " + toml_number(link.bandwidth) + "\nshared_by = " + std::to_string(link.shared_by) + "\n";
}

}  // namespace

MachineProfile parse_machine(std::string_view text, const std::string& where) {
  toml::table parsed;
  try {
    parsed = parse_toml(text);
  } catch (const TomlFault& fault) {
    throw Error(ErrorKind::kUsage, "machine",
                where + (fault.line > 0 ? ", line " + std::to_string(fault.line) : "") +
                    ": a machine's profile should be TOML: " + fault.what());
  }
  Table top(parsed, where, "");
  MachineProfile machine;
  machine.name = top.text("name");
  machine.source = top.text("source");
  machine.overlap = top.truth("overlap");
  machine.ranks_per_host = static_cast<int>(top.whole("ranks_per_host", 0, 1 << 20, 0));
  machine.memory = top.bytes("memory");
  machine.copy = top.number("copy", kBandwidth);
  const char* const link = "latency and bandwidth";
  machine.inside = read_link(top.need_table("inside", link));
  std::optional<Table> between = top.table("between");
  if (!between && machine.ranks_per_host > 0) {
    top.refuse("between", "is missing: with ranks_per_host, expected a table [between] with " + std::string(link));
  }
  machine.between = between ? read_link(std::move(*between)) : machine.inside;
  Table kernel = top.need_table("kernel", "the rates of a dtype: [kernel.bf16.forward], [kernel.bf16.backward]");
  machine.bf16 = read_rates(kernel.table("bf16"));
  machine.fp32 = read_rates(kernel.table("fp32"));
  machine.fp64 = read_rates(kernel.table("fp64"));
  kernel.end();
  if (!machine.bf16 && !machine.fp32 && !machine.fp64) {
    top.refuse("kernel", "should have the rates of at least one of bf16, fp32 and fp64, but has none");
  }
  top.end();
  return machine;
}

std::string MachineProfile::text() const {
  std::string text = "name = " + toml_string(name) + "\nsource = " + toml_string(source) +
                     "\noverlap = " + (overlap ? "true" : "false") +
                     "\nranks_per_host = " + std::to_string(ranks_per_host) + "\n";
  if (memory > 0) text += "memory = \"" + std::to_string(static_cast<int64_t>(memory)) + "\"\n";
  text += "copy = " + toml_number(copy) + "\n" + text_of("inside", inside) + text_of("between", between);
  const auto add = [&](const char* dtype, const std::optional<KernelRates>& rates) {
    if (!rates) return;
    text += text_of(std::string(dtype) + ".forward", rates->forward) +
            text_of(std::string(dtype) + ".backward", rates->backward);
  };
  add("bf16", bf16);
  add("fp32", fp32);
  add("fp64", fp64);
  return text;
}

}  // namespace annulus
