// Adaptive selection in plain loops over all blocks; see selection.h and oracle.h.
#include "attention/oracle/selection.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "attention/oracle/oracle.h"
#include "attention/oracle/rows.h"

namespace annulus {

namespace oracle_selection {
namespace {

int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

// The means over the rows of one block, of one batch row and head.
struct Mean {
  std::vector<double> of_values, of_sizes;  // of x and of abs(x)
  int64_t rows = 0;
};

// The means of the blocks of t [B, S, H, D], fp64 and contiguous. `first_only`: of each block's first row alone.
std::vector<Mean> means(const at::Tensor& t, int64_t batch, int64_t head, int64_t block, bool first_only) {
  const int64_t length = t.size(1), heads = t.size(2), dim = t.size(3);
  std::vector<Mean> result;
  for (int64_t begin = 0; begin < length; begin += block) {
    const int64_t end = first_only ? begin + 1 : std::min(begin + block, length);
    Mean mean{std::vector<double>(static_cast<size_t>(dim)), std::vector<double>(static_cast<size_t>(dim)),
              end - begin};
    for (int64_t d = 0; d < dim; ++d) {
      double sum = 0, sizes = 0;
      for (int64_t x = begin; x < end; ++x) {
        const double value = t.const_data_ptr<double>()[((batch * length + x) * heads + head) * dim + d];
        sum += value;
        sizes += std::abs(value);
      }
      mean.of_values[static_cast<size_t>(d)] = sum / static_cast<double>(mean.rows);
      mean.of_sizes[static_cast<size_t>(d)] = sizes / static_cast<double>(mean.rows);
    }
    result.push_back(std::move(mean));
  }
  return result;
}

// A key block that a query block may select beside its own.
struct Candidate {
  int64_t block = 0;
  double score = 0;     // q_mean . k_mean; what is not a number counts as the lowest
  double rounding = 0;  // how far the same sums in another order may be from `score`
};

Candidate candidate(int64_t block, const Mean& query, const Mean& key) {
  double score = 0, size = 0;
  for (size_t d = 0; d < query.of_values.size(); ++d) {
    score += query.of_values[d] * key.of_values[d];
    size += query.of_sizes[d] * key.of_sizes[d];
  }
  if (std::isnan(score)) return {block, -std::numeric_limits<double>::infinity(), 0};
  // A product of two sums, of n and m terms, summed over d numbers, and two divisions: whatever the order, at most
  // n + m + d roundings follow one another, each of 2^-53 of a sum of absolute values, and the result has one side of
  // this error here and the other one in the code that is compared (Higham, Accuracy and Stability of Numerical
  // Algorithms, section 3.1). The factor 1.01 stands for products of roundings.
  const auto roundings = static_cast<double>(query.rows + key.rows) + static_cast<double>(query.of_values.size());
  return {block, score, 2 * 1.01 * roundings * 0x1p-53 * size};
}

// The key block of the same number as query block i, by position; the offset is a multiple, says validate().
int64_t own_block(int64_t i, const BlocksSpec& spec, const AttentionShape& shape) {
  return i + shape.query_offset / spec.block;
}

std::vector<Candidate> candidates_of(const Mean& query, const std::vector<Mean>& keys, int64_t own, bool causal) {
  std::vector<Candidate> candidates;
  for (size_t j = 0; j < keys.size(); ++j) {
    const auto block = static_cast<int64_t>(j);
    if (block == own || (causal && block > own)) continue;
    candidates.push_back(candidate(block, query, keys[j]));
  }
  return candidates;
}

// Calls visit(batch row, head, query block, own block, candidates in ascending order) for each query block. Blocks are
// numbered from the first query and the first key.
void for_each_query_block(
    const BlocksSpec& spec, bool causal, const AttentionShape& shape, const at::Tensor& q_in, const at::Tensor& k_in,
    const std::function<void(int64_t, int64_t, int64_t, int64_t, const std::vector<Candidate>&)>& visit) {
  const at::Tensor q = q_in.detach().to(at::kDouble).contiguous(), k = k_in.detach().to(at::kDouble).contiguous();
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const bool first = spec.query == BlocksSpec::Query::kFirst;
      const std::vector<Mean> queries = means(q, b, h, spec.block, first);
      const std::vector<Mean> keys = means(k, b, h / (shape.heads / shape.kv_heads), spec.block, false);
      for (size_t i = 0; i < queries.size(); ++i) {
        const int64_t own = own_block(static_cast<int64_t>(i), spec, shape);
        visit(b, h, static_cast<int64_t>(i), own, candidates_of(queries[i], keys, own, causal));
      }
    }
  }
}

bool exists(int64_t block, const BlocksSpec& spec, const AttentionShape& shape) {
  return block >= 0 && block < blocks_of(shape.k_len, spec.block);
}

// See selection_fault(), for query block i of one adaptive map.
std::string row_fault(const BlocksSpec& spec, const BlockMap& map, const AttentionShape& shape, int64_t b, int64_t h,
                      int64_t i, int64_t own, const std::vector<Candidate>& candidates) {
  std::string fault;
  const int64_t row = ((map.batch == 1 ? 0 : b) * map.heads + (map.heads == 1 ? 0 : h)) * map.query_blocks + i;
  std::vector<int64_t> kept;
  for (int64_t r = map.offsets[static_cast<size_t>(row)]; r < map.offsets[static_cast<size_t>(row) + 1]; ++r) {
    const BlockRun& run = map.runs[static_cast<size_t>(r)];
    for (int64_t j = run.begin; j < run.end; ++j) kept.push_back(j);
  }
  const auto keeps = [&](int64_t j) { return std::binary_search(kept.begin(), kept.end(), j); };
  const auto wrong = [&](const std::string& what) {
    if (!fault.empty()) return;
    fault = "batch row " + std::to_string(b) + ", head " + std::to_string(h) + ", query block " + std::to_string(i) +
            ": " + what;
  };
  const bool sees_own = exists(own, spec, shape);
  const auto visible = static_cast<int64_t>(candidates.size()) + (sees_own ? 1 : 0);
  if (sees_own && !keeps(own)) wrong("the own block " + std::to_string(own) + " is not selected");
  if (static_cast<int64_t>(kept.size()) != std::min(spec.keep, visible)) {
    wrong(std::to_string(kept.size()) + " blocks are selected instead of " +
          std::to_string(std::min(spec.keep, visible)));
  }
  const Candidate *lowest = nullptr, *highest = nullptr;  // of the kept ones, and of those left out
  int64_t found = sees_own && keeps(own) ? 1 : 0;
  for (const Candidate& c : candidates) {
    const bool in = keeps(c.block);
    found += in;
    const Candidate*& bound = in ? lowest : highest;
    if (!bound || (in ? c.score + c.rounding < bound->score + bound->rounding
                      : c.score - c.rounding > bound->score - bound->rounding)) {
      bound = &c;
    }
  }
  if (found != static_cast<int64_t>(kept.size())) wrong("a block is selected that it may not see");
  if (lowest && highest && lowest->score + lowest->rounding < highest->score - highest->rounding) {
    wrong("block " + std::to_string(lowest->block) + " is selected with the score " + std::to_string(lowest->score) +
          ", but not block " + std::to_string(highest->block) + " with " + std::to_string(highest->score));
  }
  return fault;
}

// An adaptive map of a pattern with what was selected for it.
struct Selected {
  const PatternSpec& asked;
  bool causal;
  const BlockMap* map;  // null if nothing was selected
};

void append_selected(const PatternSpec& asked, const PatternSpec& selected, bool causal, std::vector<Selected>& maps) {
  causal = causal || asked.causal;
  if (asked.kind == PatternSpec::Kind::kBlocks && asked.blocks.map == BlocksSpec::Map::kAdaptive) {
    maps.push_back({asked, causal, selected.blocks.given.get()});
  }
  for (size_t i = 0; i < asked.members.size(); ++i) {
    append_selected(asked.members[i], selected.members.at(i), causal, maps);
  }
}

std::string fault_text(const Selected& map, const std::string& fault) {
  if (!map.map) return "nothing is selected for " + map.asked.text();
  return fault.empty() ? "" : map.asked.text() + ", " + fault;
}

}  // namespace

std::vector<uint8_t> selected_blocks(const BlocksSpec& spec, bool causal, const AttentionShape& shape,
                                     const at::Tensor& q, const at::Tensor& k) {
  std::vector<uint8_t> active;
  for_each_query_block(
      spec, causal, shape, q, k, [&](int64_t, int64_t, int64_t, int64_t own, std::vector<Candidate> candidates) {
        std::stable_sort(candidates.begin(), candidates.end(),  // lower blocks stay first among equal scores
                         [](const Candidate& x, const Candidate& y) { return x.score > y.score; });
        std::vector<uint8_t> row(static_cast<size_t>(blocks_of(shape.k_len, spec.block)), 0);
        int64_t left = spec.keep;
        if (exists(own, spec, shape)) row[static_cast<size_t>(own)] = 1, --left;
        for (auto c = candidates.begin(); c != candidates.end() && left > 0; ++c, --left) {
          row[static_cast<size_t>(c->block)] = 1;
        }
        active.insert(active.end(), row.begin(), row.end());
      });
  return active;
}

}  // namespace oracle_selection

std::string selection_fault(const PatternSpec& asked, const PatternSpec& selected, const AttentionShape& shape,
                            const at::Tensor& q, const at::Tensor& k) {
  using namespace oracle_selection;
  std::vector<Selected> maps;
  append_selected(asked, selected, false, maps);
  for (const Selected& map : maps) {
    std::string fault;
    const auto visit = [&](int64_t b, int64_t h, int64_t i, int64_t own, const std::vector<Candidate>& candidates) {
      if (fault.empty()) fault = row_fault(map.asked.blocks, *map.map, shape, b, h, i, own, candidates);
    };
    if (map.map) for_each_query_block(map.asked.blocks, map.causal, shape, q, k, visit);
    fault = fault_text(map, fault);
    if (!fault.empty()) return fault;
  }
  return "";
}

SelectionOfRows::SelectionOfRows(const PatternSpec& asked, const PatternSpec& selected, const AttentionShape& shape,
                                 std::vector<OracleRow> rows, int64_t head_dim)
    : asked_(asked), selected_(selected), shape_(shape), rows_(std::move(rows)), dim_(head_dim) {
  using namespace oracle_selection;
  std::vector<Selected> maps;
  append_selected(asked_, selected_, false, maps);
  int64_t size = 0;
  for (const Selected& map : maps) {
    const int64_t key_means = shape.batch * shape.kv_heads * blocks_of(shape.k_len, map.asked.blocks.block);
    size += 2 * dim_ * (key_means + static_cast<int64_t>(rows_.size()));
  }
  sums = at::zeros({size}, at::kDouble);
}

// For each map the sums of the key blocks, [B, Hk, blocks, 2, D], then those of the rows' query blocks, [n, 2, D].
int64_t SelectionOfRows::place_of_key(int64_t map_begin, int64_t block, int64_t b, int64_t kv_head, int64_t key) const {
  const int64_t blocks = oracle_selection::blocks_of(shape_.k_len, block);
  return map_begin + ((b * shape_.kv_heads + kv_head) * blocks + key / block) * 2 * dim_;
}

void SelectionOfRows::add_row(int64_t place, const double* row) {
  double* const to = sums.mutable_data_ptr<double>() + place;
  for (int64_t d = 0; d < dim_; ++d) {
    to[d] += row[d];
    to[dim_ + d] += std::abs(row[d]);
  }
}

void SelectionOfRows::add_keys(const std::vector<int64_t>& keys, const at::Tensor& k_in) {
  if (empty()) return;
  using namespace oracle_selection;
  const at::Tensor k = k_in.to(at::kDouble).contiguous();
  const double* row = k.const_data_ptr<double>();
  std::vector<Selected> maps;
  append_selected(asked_, selected_, false, maps);
  for (int64_t b = 0; b < shape_.batch; ++b) {
    for (const int64_t key : keys) {
      for (int64_t h = 0; h < shape_.kv_heads; ++h, row += dim_) {
        int64_t begin = 0;
        for (const Selected& map : maps) {
          const int64_t block = map.asked.blocks.block;
          add_row(place_of_key(begin, block, b, h, key), row);
          begin = place_of_key(begin, block, shape_.batch, 0, 0) + static_cast<int64_t>(rows_.size()) * 2 * dim_;
        }
      }
    }
  }
}

void SelectionOfRows::add_queries(size_t n, const QueriesAt& queries) {
  using namespace oracle_selection;
  std::vector<Selected> maps;
  append_selected(asked_, selected_, false, maps);
  int64_t begin = 0;
  for (const Selected& map : maps) {
    const BlocksSpec& spec = map.asked.blocks;
    const int64_t of_rows = place_of_key(begin, spec.block, shape_.batch, 0, 0);
    const int64_t first = rows_[n].index / spec.block * spec.block;
    const int64_t end =
        spec.query == BlocksSpec::Query::kFirst ? first + 1 : std::min(first + spec.block, shape_.q_len);
    const at::Tensor q = queries(first, end).to(at::kDouble).select(0, rows_[n].batch).contiguous();  // [rows, H, D]
    for (int64_t i = 0; i < end - first; ++i) {
      add_row(of_rows + static_cast<int64_t>(n) * 2 * dim_,
              q.const_data_ptr<double>() + (i * shape_.heads + rows_[n].head) * dim_);
    }
    begin = of_rows + static_cast<int64_t>(rows_.size()) * 2 * dim_;
  }
}

std::string SelectionOfRows::fault() const {
  using namespace oracle_selection;
  std::vector<Selected> maps;
  append_selected(asked_, selected_, false, maps);
  const auto mean = [&](int64_t place, int64_t rows) {
    const double* const from = sums.const_data_ptr<double>() + place;
    Mean m{{from, from + dim_}, {from + dim_, from + 2 * dim_}, rows};
    for (double& x : m.of_values) x /= static_cast<double>(rows);
    for (double& x : m.of_sizes) x /= static_cast<double>(rows);
    return m;
  };
  int64_t begin = 0;
  for (const Selected& map : maps) {
    const BlocksSpec& spec = map.asked.blocks;
    if (!map.map) return fault_text(map, "");
    const int64_t of_rows = place_of_key(begin, spec.block, shape_.batch, 0, 0);
    for (size_t n = 0; n < rows_.size(); ++n) {
      const OracleRow& row = rows_[n];
      std::vector<Mean> keys;
      for (int64_t key = 0; key < shape_.k_len; key += spec.block) {
        keys.push_back(
            mean(place_of_key(begin, spec.block, row.batch, row.head / (shape_.heads / shape_.kv_heads), key),
                 std::min(spec.block, shape_.k_len - key)));
      }
      const int64_t i = row.index / spec.block, own = own_block(i, spec, shape_);
      const bool first = spec.query == BlocksSpec::Query::kFirst;
      const Mean query = mean(of_rows + static_cast<int64_t>(n) * 2 * dim_,
                              first ? 1 : std::min(spec.block, shape_.q_len - i * spec.block));
      const std::string fault =
          row_fault(spec, *map.map, shape_, row.batch, row.head, i, own, candidates_of(query, keys, own, map.causal));
      if (!fault.empty()) return fault_text(map, fault);
    }
    begin = of_rows + static_cast<int64_t>(rows_.size()) * 2 * dim_;
  }
  return "";
}

}  // namespace annulus
