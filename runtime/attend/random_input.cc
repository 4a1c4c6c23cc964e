// See random_input.h.
#include "runtime/attend/random_input.h"

#include <ATen/ops/empty.h>

#include <charconv>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 27;
constexpr int64_t kLargest = int64_t{1} << 40;

const std::vector<std::pair<std::string, at::ScalarType>>& dtypes() {
  static const std::vector<std::pair<std::string, at::ScalarType>> table = {
      {"f32", at::kFloat}, {"f64", at::kDouble}, {"bf16", at::kBFloat16}, {"f16", at::kHalf}};
  return table;
}

std::string dtype_name(at::ScalarType dtype) {
  for (const auto& [name, known] : dtypes()) {
    if (known == dtype) return name;
  }
  return "";
}

template <typename Number>
Number parse_number(const std::string& text, const std::string& where, Number least, Number most) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most) return value;
  throw Error(
      ErrorKind::kUsage, "attend",
      where + ": expected a number of at least " + exact(static_cast<double>(least)) + ", got \"" + text + "\"");
}

}  // namespace

std::string RandomInput::text() const {
  const auto field = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value) + ",";
  };
  return field("batch", batch) + field("queries", queries) + field("keys", keys) + field("heads", heads) +
         field("kv_heads", kv_heads) + field("dim", dim) + "dtype=" + dtype_name(dtype) +
         ",seed=" + std::to_string(seed) + (magnitude == 1 ? "" : ",magnitude=" + exact(magnitude));
}

std::string random_input_defaults() {
  const RandomInput d;
  return "batch=" + std::to_string(d.batch) + ",queries=" + std::to_string(d.queries) +
         ",keys=QUERIES,heads=" + std::to_string(d.heads) + ",kv_heads=HEADS,dim=" + std::to_string(d.dim) +
         ",dtype=" + dtype_name(d.dtype) + ",seed=" + std::to_string(d.seed) + ",magnitude=" + exact(d.magnitude);
}

RandomInput parse_random_input(std::string_view text, std::string_view where) {
  RandomInput input;
  const std::map<std::string, std::pair<int64_t*, int64_t>> numbers = {
      {"batch", {&input.batch, 0}}, {"queries", {&input.queries, 0}},   {"keys", {&input.keys, 0}},
      {"heads", {&input.heads, 1}}, {"kv_heads", {&input.kv_heads, 1}}, {"dim", {&input.dim, 1}},
      {"seed", {&input.seed, 0}}};
  std::vector<std::string> known = {"batch", "queries", "keys", "heads",    "kv_heads",
                                    "dim",   "dtype",   "seed", "magnitude"};
  std::set<std::string> seen;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string field(text.substr(0, comma));
    text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
    const size_t equals = field.find('=');
    const std::string name = field.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : field.substr(equals + 1);
    const std::string place = std::string(where) + ", " + name;
    if (!seen.insert(name).second) throw Error(ErrorKind::kUsage, "attend", place + ": is given twice");
    if (const auto found = numbers.find(name); found != numbers.end()) {
      *found->second.first = parse_number<int64_t>(value, place, found->second.second, kLargest);
    } else if (name == "dtype") {
      std::vector<std::string> names;
      for (const auto& entry : dtypes()) names.push_back(entry.first);
      input.dtype = dtypes()[index_of_name(value, names, "dtype", where)].second;
    } else if (name == "magnitude") {
      input.magnitude = parse_number<double>(value, place, 0, 1e6);
    } else {
      throw Error(ErrorKind::kUsage, "attend",
                  std::string(where) + ": expected NAME=NUMBER,..., got \"" + field + "\"" + suggestion(name, known));
    }
  }
  if (!seen.contains("keys")) input.keys = input.queries;
  if (!seen.contains("kv_heads")) input.kv_heads = input.heads;
  double elements = 2.0 * static_cast<double>(input.batch) * static_cast<double>(input.dim);
  elements *= static_cast<double>(input.queries) * static_cast<double>(input.heads) +
              static_cast<double>(input.keys) * static_cast<double>(input.kv_heads);
  if (elements > static_cast<double>(kMostElements)) {
    throw Error(ErrorKind::kUsage, "attend",
                std::string(where) + ": q, k, v and dout would have " + exact(elements) + " elements, and every rank " +
                    "makes them all, so they may be at most " + std::to_string(kMostElements) +
                    "; write a file for --input instead");
  }
  return input;
}

RandomTensors make_random(const RandomInput& in) {
  std::mt19937_64 random(static_cast<uint64_t>(in.seed));
  const auto tensor = [&](int64_t length, int64_t heads, double magnitude) {
    at::Tensor t = at::empty({in.batch, length, heads, in.dim}, at::kDouble);
    std::normal_distribution<double> normal(0, 1);
    auto* const p = t.mutable_data_ptr<double>();
    for (int64_t i = 0; i < t.numel(); ++i) p[i] = magnitude * normal(random);
    return t.to(in.dtype);
  };
  RandomTensors tensors;
  tensors.q = tensor(in.queries, in.heads, in.magnitude);
  tensors.k = tensor(in.keys, in.kv_heads, in.magnitude);
  tensors.v = tensor(in.keys, in.kv_heads, 1);
  tensors.dout = tensor(in.queries, in.heads, 1);
  return tensors;
}

}  // namespace annulus
