// See select_blocks.h. Each rank adds up its rows block by block; the sums of the keys go to all ranks, those of each
// query block to the one rank that selects for it; the selections go to all ranks.
#include "attention/execution/select_blocks.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

namespace annulus {
namespace {

constexpr int64_t kScoresAtOnce = int64_t{1} << 20;  // 8 MB

// The sums of this rank's rows [B, rows, heads, D], block by block: fp64 [blocks, B, heads, D], 0 where it has none.
at::Tensor block_sums(const at::Tensor& rows, const std::vector<Span>& positions, int64_t block, int64_t blocks) {
  const at::Tensor sums =
      at::zeros({blocks, rows.size(0), rows.size(2), rows.size(3)}, rows.options().dtype(at::kDouble));
  int64_t first_row = 0;
  for (const Span& span : positions) {
    // The rows of a block follow each other.
    int64_t begin = 0;
    for (int64_t b = span.empty() ? blocks : span.begin / block; b < blocks && begin < span.count; ++b) {
      const int64_t end = span.clip(0, (b + 1) * block - 1).count;
      if (end > begin) sums.select(0, b).add_(rows.narrow(1, first_row + begin, end - begin).to(at::kDouble).sum({1}));
      begin = end;
    }
    first_row += span.count;
  }
  return sums;
}

// The first rows of the blocks, likewise.
at::Tensor first_rows(const at::Tensor& rows, const std::vector<Span>& positions, int64_t block, int64_t blocks) {
  const at::Tensor firsts =
      at::zeros({blocks, rows.size(0), rows.size(2), rows.size(3)}, rows.options().dtype(at::kDouble));
  int64_t first_row = 0;
  for (const Span& span : positions) {
    const Span found = intersect(span, {0, block, blocks});
    for (int64_t i = 0; i < found.count; ++i) {
      firsts.select(0, found.at(i) / block).copy_(rows.select(1, first_row + span.index_of(found.at(i))));
    }
    first_row += span.count;
  }
  return firsts;
}

// Sums [blocks, ...] of a sequence of `length` to means; `first`: the number of sums[0] among all blocks.
void divide_by_counts(const at::Tensor& sums, int64_t first, int64_t block, int64_t length) {
  for (int64_t i = 0; i < sums.size(0); ++i) {
    const int64_t count = std::min(block, length - (first + i) * block);
    if (count > 0) sums.select(0, i).div_(static_cast<double>(count));
  }
}

// Key means of one batch row and kv head on the CPU, [blocks, D].
struct KeyMeans {
  const double* data;
  int64_t dim;
  double largest_norm;
};

// In the order of the channels, so that equal keys have equal scores to the last bit.
double plain_score(const double* query, const KeyMeans& keys, int64_t block) {
  double sum = 0;
  for (int64_t d = 0; d < keys.dim; ++d) sum += query[d] * keys.data[block * keys.dim + d];
  return std::isnan(sum) ? -std::numeric_limits<double>::infinity() : sum;
}

// The `keep` of the key blocks [0, end) with the largest scores, `own` among them, ascending, in `selected`. `scores`
// come from a fast product that rounds each block in its own way; blocks too near to the last one that is kept are
// compared by plain_score.
class RowSelection {
 public:
  void select(const double* scores, const double* query, const KeyMeans& keys, int64_t own, int64_t end, int64_t keep,
              std::vector<int64_t>& selected) {
    selected.clear();
    if (keep >= end) {
      for (int64_t j = 0; j < end; ++j) selected.push_back(j);
      return;
    }
    const bool has_own = own >= 0 && own < end;
    if (has_own) selected.push_back(own);
    const int64_t wanted = keep - (has_own ? 1 : 0);
    if (wanted > 0) select_others(scores, query, keys, own, end, wanted, selected);
    std::sort(selected.begin(), selected.end());
  }

 private:
  void select_others(const double* scores, const double* query, const KeyMeans& keys, int64_t own, int64_t end,
                     int64_t wanted, std::vector<int64_t>& selected) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const auto score = [&](int64_t j) { return std::isnan(scores[j]) ? -kInfinity : scores[j]; };
    sorted_.clear();
    for (int64_t j = 0; j < end; ++j) {
      if (j != own) sorted_.push_back(score(j));
    }
    std::nth_element(sorted_.begin(), sorted_.begin() + (wanted - 1), sorted_.end(), std::greater<>());
    const double last = sorted_[static_cast<size_t>(wanted - 1)];
    // What either product may be off by, for vectors of these norms.
    double norm = 0;
    for (int64_t d = 0; d < keys.dim; ++d) norm += query[d] * query[d];
    double margin = 4 * static_cast<double>(keys.dim) * 0x1p-52 * std::sqrt(norm) * keys.largest_norm;
    if (!std::isfinite(margin)) margin = kInfinity;
    near_.clear();
    const size_t before = selected.size();
    for (int64_t j = 0; j < end; ++j) {
      if (j == own) continue;
      if (score(j) > last + margin) {
        selected.push_back(j);
      } else if (score(j) == last || std::abs(score(j) - last) <= margin) {
        near_.push_back({0, j});
      }
    }
    const size_t missing = static_cast<size_t>(wanted) - (selected.size() - before);
    if (near_.size() > missing) {
      for (auto& [plain, j] : near_) plain = -plain_score(query, keys, j);
      std::sort(near_.begin(), near_.end());  // the largest score first, of equals the lower block
      near_.resize(missing);
    }
    for (const auto& [plain, j] : near_) selected.push_back(j);
  }

  std::vector<double> sorted_;
  std::vector<std::pair<double, int64_t>> near_;  // (minus the score, block)
};

// Everything about one map to be selected.
struct Task {
  BlocksSpec spec;
  bool causal;
  AttentionShape shape;
  int64_t query_blocks, key_blocks;
  int64_t first_own;  // the key block at the place of query block 0

  // Key blocks that a query block may see.
  int64_t visible(int64_t query_block) const {
    return causal ? std::clamp<int64_t>(first_own + query_block + 1, 0, key_blocks) : key_blocks;
  }
};

// The selection for `count` query blocks from `first`: int64 [count, B, H, keep], ascending, -1 where there are fewer.
// query_means [>= count, B, H, D], key_means [key blocks, B, Hk, D].
at::Tensor select_share(const Task& task, const at::Tensor& query_means, const at::Tensor& key_means, int64_t first,
                        int64_t count) {
  const int64_t batch = task.shape.batch, heads = task.shape.heads, group = heads / task.shape.kv_heads;
  const at::Tensor chosen = at::full({query_means.size(0), batch, heads, task.spec.keep}, -1, at::kLong);
  RowSelection row;
  std::vector<int64_t> selected;
  const int64_t at_once = std::max<int64_t>(1, kScoresAtOnce / task.key_blocks);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const at::Tensor keys = key_means.select(1, b).select(1, h / group).contiguous();  // [key blocks, D]
      const at::Tensor keys_here = keys.cpu();
      const double norm =
          keys.size(1) == 0 ? 0 : at::linalg_vector_norm(keys_here, 2, at::IntArrayRef{1}).max().item<double>();
      const KeyMeans means{keys_here.const_data_ptr<double>(), keys.size(1), norm};
      for (int64_t i = 0; i < count; i += at_once) {
        const int64_t n = std::min(at_once, count - i);
        const at::Tensor queries = query_means.narrow(0, i, n).select(1, b).select(1, h).contiguous();
        const at::Tensor scores = queries.matmul(keys.t()).cpu().contiguous(), queries_here = queries.cpu();
        for (int64_t x = 0; x < n; ++x) {
          const int64_t query_block = first + i + x;
          row.select(scores.const_data_ptr<double>() + x * task.key_blocks,
                     queries_here.const_data_ptr<double>() + x * means.dim, means, task.first_own + query_block,
                     task.visible(query_block), task.spec.keep, selected);
          std::copy(selected.begin(), selected.end(),
                    chosen.mutable_data_ptr<int64_t>() + (((i + x) * batch + b) * heads + h) * task.spec.keep);
        }
      }
    }
  }
  return chosen;
}

// From int64 [query blocks or more, B, H, keep].
BlockMap map_of(const Task& task, const at::Tensor& chosen) {
  BlockMap map{task.spec.block, task.shape.batch, task.shape.heads, task.query_blocks, task.key_blocks, {0}, {}};
  const int64_t keep = task.spec.keep;
  for (int64_t b = 0; b < map.batch; ++b) {
    for (int64_t h = 0; h < map.heads; ++h) {
      for (int64_t i = 0; i < map.query_blocks; ++i) {
        const int64_t* blocks = chosen.const_data_ptr<int64_t>() + ((i * map.batch + b) * map.heads + h) * keep;
        for (int64_t x = 0; x < keep && blocks[x] >= 0; ++x) {
          if (x > 0 && blocks[x] == blocks[x - 1] + 1) {
            map.runs.back().end = blocks[x] + 1;
          } else {
            map.runs.push_back({blocks[x], blocks[x] + 1});
          }
        }
        map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
      }
    }
  }
  return map;
}

// All that are visible: nothing is to be compared, and one map serves all.
BlockMap map_of_all(const Task& task) {
  BlockMap map{task.spec.block, 1, 1, task.query_blocks, task.key_blocks, {0}, {}};
  for (int64_t i = 0; i < map.query_blocks; ++i) {
    if (task.visible(i) > 0) map.runs.push_back({0, task.visible(i)});
    map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
  }
  return map;
}

BlockMap select_map(const Task& task, const PlanRequest& request, const at::Tensor& q, const at::Tensor& k,
                    Communicator& comm, const std::string& label) {
  if (task.spec.keep >= task.key_blocks || task.query_blocks == 0 || task.shape.batch == 0) return map_of_all(task);
  const OpLabel op{label, 0};
  const auto rank = static_cast<size_t>(comm.rank());
  const bool alone = request.ranks == 1;

  at::Tensor key_means = block_sums(k, key_layout(request).spans[rank], task.spec.block, task.key_blocks);
  if (!alone) comm.all_reduce(key_means, ReduceOp::kSum, op);
  divide_by_counts(key_means, 0, task.spec.block, task.shape.k_len);

  // Every rank selects for as many query blocks, the last ones perhaps for fewer.
  const int64_t share = ceil_div(task.query_blocks, request.ranks), first = comm.rank() * share;
  const bool mean = task.spec.query == BlocksSpec::Query::kMean;
  const std::vector<Span> positions = query_layout(request).spans[rank];
  at::Tensor query_means = (mean ? block_sums : first_rows)(q, positions, task.spec.block, share * request.ranks);
  if (!alone) {
    at::Tensor own = at::empty({share, q.size(0), q.size(2), q.size(3)}, query_means.options());
    comm.reduce_scatter(own, query_means.unflatten(0, {request.ranks, share}), op);
    query_means = own;
  }
  if (mean) divide_by_counts(query_means, first, task.spec.block, task.shape.q_len);

  at::Tensor chosen =
      select_share(task, query_means, key_means, first, std::clamp<int64_t>(task.query_blocks - first, 0, share));
  if (!alone) {
    const at::Tensor mine = chosen.to(q.device());
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes.insert(sizes.begin(), request.ranks);
    at::Tensor all = at::empty(sizes, mine.options());
    comm.all_gather(all, mine, op);
    chosen = all.flatten(0, 1).cpu();
  }
  return map_of(task, chosen);
}

void select_all(PatternSpec& spec, const PlanRequest& request, const at::Tensor& q, const at::Tensor& k,
                Communicator& comm, const std::string& label) {
  for (PatternSpec& member : spec.members) select_all(member, request, q, k, comm, label);
  if (spec.kind != PatternSpec::Kind::kBlocks || spec.blocks.map != BlocksSpec::Map::kAdaptive) return;
  const int64_t block = spec.blocks.block;
  const Task task{spec.blocks,
                  spec.causal,
                  request.shape,
                  ceil_div(request.shape.q_len, block),
                  ceil_div(request.shape.k_len, block),
                  request.shape.query_offset / block};  // a multiple, says validate
  spec.blocks = given_map(std::make_shared<const BlockMap>(select_map(task, request, q, k, comm, label)));
}

}  // namespace

PlanRequest select_blocks(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, Communicator& comm,
                          const std::string& label) {
  if (!is_adaptive(request.pattern)) return request;
  validate(request.pattern, request.shape);
  PlanRequest selected = request;
  selected.pattern = with_causal_members(std::move(selected.pattern));
  // Nothing of the selection is differentiated: gradients flow through the attention only.
  select_all(selected.pattern, request, q.detach(), k.detach(), comm, label);
  return selected;
}

}  // namespace annulus
