// Adaptive selection in plain loops over all blocks; see selection.h and oracle.h.
#include "attention/oracle/selection.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "attention/oracle/oracle.h"

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

// Calls visit(batch row, head, query block, own block, candidates in ascending order) for each query block. Blocks are
// numbered from the first query and the first key.
void for_each_query_block(
    const BlocksSpec& spec, bool causal, const AttentionShape& shape, const at::Tensor& q_in, const at::Tensor& k_in,
    const std::function<void(int64_t, int64_t, int64_t, int64_t, const std::vector<Candidate>&)>& visit) {
  const at::Tensor q = q_in.detach().to(at::kDouble).contiguous(), k = k_in.detach().to(at::kDouble).contiguous();
  std::vector<Candidate> candidates;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const bool first = spec.query == BlocksSpec::Query::kFirst;
      const std::vector<Mean> queries = means(q, b, h, spec.block, first);
      const std::vector<Mean> keys = means(k, b, h / (shape.heads / shape.kv_heads), spec.block, false);
      for (size_t i = 0; i < queries.size(); ++i) {
        const int64_t own = static_cast<int64_t>(i) + shape.query_offset / spec.block;  // a multiple, says validate()
        candidates.clear();
        for (size_t j = 0; j < keys.size(); ++j) {
          const auto block = static_cast<int64_t>(j);
          if (block == own || (causal && block > own)) continue;
          candidates.push_back(candidate(block, queries[i], keys[j]));
        }
        visit(b, h, static_cast<int64_t>(i), own, candidates);
      }
    }
  }
}

bool exists(int64_t block, const BlocksSpec& spec, const AttentionShape& shape) {
  return block >= 0 && block < blocks_of(shape.k_len, spec.block);
}

// See selection_fault(), for one adaptive map.
std::string map_fault(const BlocksSpec& spec, bool causal, const BlockMap& map, const AttentionShape& shape,
                      const at::Tensor& q, const at::Tensor& k) {
  std::string fault;
  for_each_query_block(
      spec, causal, shape, q, k,
      [&](int64_t b, int64_t h, int64_t i, int64_t own, const std::vector<Candidate>& candidates) {
        if (!fault.empty()) return;
        const int64_t row = ((map.batch == 1 ? 0 : b) * map.heads + (map.heads == 1 ? 0 : h)) * map.query_blocks + i;
        std::vector<int64_t> kept;
        for (int64_t r = map.offsets[static_cast<size_t>(row)]; r < map.offsets[static_cast<size_t>(row) + 1]; ++r) {
          const BlockRun& run = map.runs[static_cast<size_t>(r)];
          for (int64_t j = run.begin; j < run.end; ++j) kept.push_back(j);
        }
        const auto keeps = [&](int64_t j) { return std::binary_search(kept.begin(), kept.end(), j); };
        const auto wrong = [&](const std::string& what) {
          if (!fault.empty()) return;
          fault = "batch row " + std::to_string(b) + ", head " + std::to_string(h) + ", query block " +
                  std::to_string(i) + ": " + what;
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
          wrong("block " + std::to_string(lowest->block) + " is selected with the score " +
                std::to_string(lowest->score) + ", but not block " + std::to_string(highest->block) + " with " +
                std::to_string(highest->score));
        }
      });
  return fault;
}

std::string fault_below(const PatternSpec& asked, const PatternSpec& selected, bool causal, const AttentionShape& shape,
                        const at::Tensor& q, const at::Tensor& k) {
  causal = causal || asked.causal;
  if (asked.kind == PatternSpec::Kind::kBlocks && asked.blocks.map == BlocksSpec::Map::kAdaptive) {
    if (!selected.blocks.given) return "nothing is selected for " + asked.text();
    const std::string fault = map_fault(asked.blocks, causal, *selected.blocks.given, shape, q, k);
    return fault.empty() ? "" : asked.text() + ", " + fault;
  }
  for (size_t i = 0; i < asked.members.size(); ++i) {
    const std::string fault = fault_below(asked.members[i], selected.members.at(i), causal, shape, q, k);
    if (!fault.empty()) return fault;
  }
  return "";
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
  return oracle_selection::fault_below(asked, selected, false, shape, q, k);
}

}  // namespace annulus
