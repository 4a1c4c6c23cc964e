// See random_input.h.
#include "runtime/attend/random_input.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <numbers>
#include <set>
#include <vector>

#include "attention/oracle/draws.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

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

// Writes `count` numbers of the tensor with this number, from the element `first` of the whole tensor.
void draw_normal(int64_t seed, uint32_t tensor, int64_t first, int64_t count, double magnitude, double* to) {
  const auto halves = [](int64_t x) {
    return std::array<uint32_t, 2>{static_cast<uint32_t>(x), static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32)};
  };
  for (int64_t pair = first / 2; 2 * pair < first + count; ++pair) {
    const auto [low, high] = halves(pair);
    const std::array<uint32_t, 4> words = oracle_draws::philox4x32_10({low, high, tensor, 0}, halves(seed));
    const auto fraction = [&](size_t word) {  // of 53 bits, in (0, 1]
      const uint64_t bits = (uint64_t{words[word + 1]} << 32 | words[word]) >> 11;
      return static_cast<double>(bits + 1) * 0x1p-53;
    };
    const double radius = magnitude * std::sqrt(-2 * std::log(fraction(0)));
    const double angle = 2 * std::numbers::pi * fraction(2);
    for (const int64_t element : {2 * pair, 2 * pair + 1}) {
      if (element < first || element >= first + count) continue;
      to[element - first] = radius * (element % 2 == 0 ? std::cos(angle) : std::sin(angle));
    }
  }
}

// The rows at `spans` of a tensor [batch, length, heads, dim]. They are rounded to the dtype piece by piece.
at::Tensor rows_of_tensor(const RandomInput& in, uint32_t number, int64_t length, int64_t heads, double magnitude,
                          const std::vector<Span>& spans) {
  constexpr int64_t kPiece = int64_t{1} << 16;  // elements
  int64_t rows = 0;
  for (const Span& span : spans) rows += span.count;
  const int64_t width = heads * in.dim, rows_of_piece = std::max<int64_t>(1, kPiece / width);
  at::Tensor tensor = at::empty({in.batch, rows, heads, in.dim}, in.dtype);
  const at::Tensor piece = at::empty({rows_of_piece, heads, in.dim}, at::kDouble);
  for (int64_t b = 0; b < in.batch; ++b) {
    int64_t row = 0;
    for (const Span& span : spans) {
      for (int64_t begin = 0; begin < span.count; begin += rows_of_piece) {
        const int64_t n = std::min(rows_of_piece, span.count - begin);
        for (int64_t i = 0; i < n; ++i) {
          draw_normal(in.seed, number, (b * length + span.at(begin + i)) * width, width, magnitude,
                      piece.mutable_data_ptr<double>() + i * width);
        }
        tensor.select(0, b).narrow(0, row, n).copy_(piece.narrow(0, 0, n));
        row += n;
      }
    }
  }
  return tensor;
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
  if (elements > 0x1p62) {
    throw Error(ErrorKind::kUsage, "attend",
                std::string(where) + ": q, k, v and dout would have " + exact(elements) +
                    " elements, but may have at most 2^62; give smaller sizes");
  }
  return input;
}

RandomTensors make_random(const RandomInput& in, const std::vector<Span>& queries, const std::vector<Span>& keys) {
  enum { kQ, kK, kV, kDout };  // the numbers are part of the definition
  RandomTensors tensors;
  tensors.q = rows_of_tensor(in, kQ, in.queries, in.heads, in.magnitude, queries);
  tensors.k = rows_of_tensor(in, kK, in.keys, in.kv_heads, in.magnitude, keys);
  tensors.v = rows_of_tensor(in, kV, in.keys, in.kv_heads, 1, keys);
  tensors.dout = rows_of_tensor(in, kDout, in.queries, in.heads, 1, queries);
  return tensors;
}

at::Tensor random_sinks(const RandomInput& in) {
  constexpr uint32_t kSinks = 4;
  const at::Tensor sinks = at::empty({in.heads}, at::kDouble);
  draw_normal(in.seed, kSinks, 0, in.heads, 1, sinks.mutable_data_ptr<double>());
  return sinks.to(at::kFloat);
}

RandomTensors make_random(const RandomInput& in) {
  return make_random(in, {Span::range(0, in.queries)}, {Span::range(0, in.keys)});
}

}  // namespace annulus
