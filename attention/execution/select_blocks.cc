// See select_blocks.h. Each rank adds up its rows block by block. The sums of the keys are reduced to all ranks, and
// those of each query block to the one rank that selects for it. Then the selections are gathered on all ranks.
#include "attention/execution/select_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "memory/upload.h"

namespace annulus {
namespace {

// The number of fp64 values held at once while rows are summed and blocks selected: 8 MB on CPUs, to stay near the
// caches, and 64 MB on GPUs, to need fewer launches.
constexpr int64_t kAtOnceOnCpu = int64_t{1} << 20, kAtOnceOnGpu = int64_t{1} << 23;
int64_t at_once(const at::Tensor& tensor) { return tensor.is_cpu() ? kAtOnceOnCpu : kAtOnceOnGpu; }

int64_t per_row(const at::Tensor& rows) { return std::max<int64_t>(1, rows.size(0) * rows.size(2) * rows.size(3)); }

// Divides the rows of a span by blocks. Whole blocks form periods of `rows` rows in `blocks` blocks. The n-th block of
// every period has the same number of rows. A period has more than one block only if the stride does not divide the
// block size: with blocks of 16 and stride 3, 16 rows lie in 3 blocks.
struct Periods {
  int64_t rows, blocks;
  int64_t first_block;  // the first whole block
  int64_t count;        // the number of full periods

  Periods(const Span& span, int64_t block) {
    const int64_t common = std::gcd(block, span.stride);
    rows = block / common;
    blocks = span.stride / common;
    // A block is whole if the span, continued at both ends, would have no further member in it.
    first_block = std::max<int64_t>(0, floor_div(span.begin - span.stride, block) + 1);
    const int64_t end = floor_div(span.last() + span.stride, block);
    count = std::max<int64_t>(0, end - first_block) / blocks;
  }
  int64_t end_block() const { return first_block + count * blocks; }
};

at::Tensor zeros_by_block(const at::Tensor& rows, int64_t blocks) {
  return at::zeros({blocks, rows.size(0), rows.size(2), rows.size(3)}, rows.options().dtype(at::kDouble));
}

// The sums of this rank's rows [B, rows, heads, D] for each block: fp64 [blocks, B, heads, D], 0 for blocks without
// rows.
at::Tensor block_sums(const at::Tensor& rows, const std::vector<Span>& positions, int64_t block, int64_t blocks) {
  const at::Tensor sums = zeros_by_block(rows, blocks);
  int64_t first_row = 0;
  for (const Span& span : positions) {
    if (span.empty()) continue;
    // The index in the span of the first position in block b or later. The rows of a block are consecutive.
    const auto begin_of = [&](int64_t b) {
      return std::clamp<int64_t>(ceil_div(b * block - span.begin, span.stride), 0, span.count);
    };
    const auto add_one = [&](int64_t b) {
      const int64_t begin = begin_of(b), end = begin_of(b + 1);
      if (end > begin) sums.select(0, b).add_(rows.narrow(1, first_row + begin, end - begin).to(at::kDouble).sum({1}));
    };
    const Periods whole(span, block);
    const int64_t last_block = span.last() / block;
    const int64_t ragged_end = whole.count > 0 ? whole.first_block : last_block + 1;
    for (int64_t b = span.begin / block; b < ragged_end; ++b) add_one(b);
    const int64_t step = std::max<int64_t>(1, at_once(rows) / (per_row(rows) * whole.rows));
    for (int64_t p = 0; p < whole.count; p += step) {
      const int64_t n = std::min(step, whole.count - p), first = whole.first_block + p * whole.blocks;
      const at::Tensor wide = rows.narrow(1, first_row + begin_of(first), n * whole.rows)
                                  .to(at::kDouble)
                                  .unflatten(1, {n, whole.rows});  // [B, n, rows of a period, heads, D]
      for (int64_t i = 0; i < whole.blocks; ++i) {
        const int64_t begin = begin_of(first + i), end = begin_of(first + i + 1);
        if (end == begin) continue;
        sums.slice(0, first + i, first + n * whole.blocks, whole.blocks)
            .add_(wide.narrow(2, begin - begin_of(first), end - begin).sum({2}).transpose(0, 1));
      }
    }
    if (whole.count > 0) {
      for (int64_t b = whole.end_block(); b <= last_block; ++b) add_one(b);
    }
    first_row += span.count;
  }
  return sums;
}

// The first row of each block, in the same form; 0 for blocks whose first row another rank has.
at::Tensor first_rows(const at::Tensor& rows, const std::vector<Span>& positions, int64_t block, int64_t blocks) {
  const at::Tensor firsts = zeros_by_block(rows, blocks);
  int64_t first_row = 0;
  for (const Span& span : positions) {
    const Span found = intersect(span, {0, block, blocks});
    if (!found.empty()) {
      const int64_t row = first_row + span.index_of(found.begin), last = first_row + span.index_of(found.last());
      const int64_t rows_apart = std::max<int64_t>(1, found.stride / span.stride);
      const int64_t blocks_apart = std::max<int64_t>(1, found.stride / block);
      firsts.slice(0, found.begin / block, found.last() / block + 1, blocks_apart)
          .copy_(rows.slice(1, row, last + 1, rows_apart).transpose(0, 1));
    }
    first_row += span.count;
  }
  return firsts;
}

// Turns the sums [blocks, ...] of a sequence of `length` into means. `first` is the number of the block of sums[0]. The
// divisor is a tensor, because a GPU would multiply by the reciprocal of a number, and equal keys in a shorter last
// block would then get a different mean.
void divide_by_counts(const at::Tensor& sums, int64_t first, int64_t block, int64_t length) {
  const at::Tensor counts = at::full({sums.size(0), 1, 1, 1}, static_cast<double>(block), sums.options());
  const int64_t ragged = length / block - first, rest = length % block;
  if (rest > 0 && ragged >= 0 && ragged < sums.size(0)) counts.select(0, ragged).fill_(static_cast<double>(rest));
  sums.div_(counts);
}

// The key means of one batch row and kv head, [blocks, D], on the CPU.
struct KeyMeans {
  const double* data;
  int64_t dim;
  double largest_norm;
};

// The score of a block, summed in the order of the channels, so that equal keys have equal scores to the last bit.
double plain_score(const double* query, const KeyMeans& keys, int64_t block) {
  double sum = 0;
  for (int64_t d = 0; d < keys.dim; ++d) sum += query[d] * keys.data[block * keys.dim + d];
  return std::isnan(sum) ? -std::numeric_limits<double>::infinity() : sum;
}

// select() sets `selected` to the `keep` key blocks of [0, end) with the largest scores, including `own`, in ascending
// order. `scores` come from a fast product that may round equal keys of different blocks differently. Blocks whose
// score is too near to that of the last kept block are therefore compared by plain_score.
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
    // The possible rounding error of either product for vectors of these norms.
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
      std::sort(near_.begin(), near_.end());  // the largest score first, and the lower block first among equal scores
      near_.resize(missing);
    }
    for (const auto& [plain, j] : near_) selected.push_back(j);
  }

  std::vector<double> sorted_;
  std::vector<std::pair<double, int64_t>> near_;  // (minus the score, block)
};

// Everything about one map that is to be selected, apart from q and k.
struct Task {
  BlocksSpec spec;
  bool causal;
  AttentionShape shape;
  int64_t query_blocks, key_blocks;
  int64_t first_own;  // the key block at the position of query block 0

  // The number of key blocks that a query block may see.
  int64_t visible(int64_t query_block) const {
    return causal ? std::clamp<int64_t>(first_own + query_block + 1, 0, key_blocks) : key_blocks;
  }
};

constexpr int64_t kUndecided = -2;  // stands for the first block of a row that is not decided yet

// The selection for `count` query blocks from `first`, as far as fast products can decide it: int64 [count, B, H,
// keep], ascending, on the device of the means, without waiting for the device. A row begins with kUndecided if the
// score of another block is too near to that of the last kept block. Rows that see no more than `keep` blocks are
// meaningless.
at::Tensor select_by_products(const Task& task, const at::Tensor& query_means, const at::Tensor& key_means,
                              int64_t first, int64_t count) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const int64_t batch = task.shape.batch, heads = task.shape.heads, kv_heads = task.shape.kv_heads;
  const int64_t group = heads / kv_heads, dim = key_means.size(3);
  const at::TensorOptions whole = key_means.options().dtype(at::kLong);
  const at::Tensor chosen = at::empty({count, batch, heads, task.spec.keep}, whole);
  const at::Tensor keys = key_means.permute({1, 2, 3, 0}).flatten(0, 1);  // [B Hk, D, key blocks]
  const at::Tensor largest =
      at::linalg_vector_norm(key_means, 2, at::IntArrayRef{-1}).amax(0).unsqueeze(-1).unsqueeze(-1);  // [B, Hk, 1, 1]
  const at::Tensor blocks = at::arange(task.key_blocks, whole);
  const int64_t step = std::max<int64_t>(1, at_once(keys) / (task.key_blocks * batch * heads));
  for (int64_t i = 0; i < count; i += step) {
    const int64_t n = std::min(step, count - i);
    const at::Tensor queries = query_means.narrow(0, i, n).unflatten(2, {kv_heads, group}).permute({1, 2, 3, 0, 4});
    const at::Tensor scores = queries.reshape({batch * kv_heads, group * n, dim})
                                  .matmul(keys)
                                  .view({batch, kv_heads, group, n, task.key_blocks});
    scores.nan_to_num_(-kInfinity, kInfinity, -kInfinity);
    const int64_t own_of_first = task.first_own + first + i;
    const at::Tensor own = at::arange(own_of_first, own_of_first + n, whole).unsqueeze(-1);  // [n, 1]
    scores.masked_fill_(blocks == own, kInfinity);
    if (task.causal) scores.masked_fill_(blocks > own, -kInfinity);
    const auto [values, indices] = scores.topk(task.spec.keep, -1, /*largest=*/true, /*sorted=*/false);
    // The margin of RowSelection. If it is NaN, the row stays undecided.
    const at::Tensor margin = (at::linalg_vector_norm(queries, 2, at::IntArrayRef{-1}) * largest)
                                  .mul_(4 * static_cast<double>(dim) * 0x1p-52);
    const at::Tensor threshold = (values.amin(-1) - margin).unsqueeze(-1);
    const at::Tensor near_or_above = (scores >= threshold).sum(-1);
    const at::Tensor sorted = std::get<0>(indices.sort(-1));
    sorted.select(-1, 0).masked_fill_(near_or_above != task.spec.keep, kUndecided);
    chosen.narrow(0, i, n).copy_(sorted.flatten(1, 2).permute({2, 0, 1, 3}));
  }
  return chosen;
}

// Decides the undecided `rows` of one batch row and head on the CPU and writes each selection to row_of(row).
template <typename RowOf>
void decide_rows(const Task& task, const at::Tensor& query_means, const at::Tensor& key_means, int64_t first,
                 const std::vector<int64_t>& rows, const RowOf& row_of) {
  const at::Tensor keys = key_means.contiguous(), queries_here = query_means.contiguous();  // [key blocks, D], [., D]
  const double norm = keys.size(1) == 0 ? 0 : at::linalg_vector_norm(keys, 2, at::IntArrayRef{1}).max().item<double>();
  const KeyMeans means{keys.const_data_ptr<double>(), keys.size(1), norm};
  RowSelection row;
  std::vector<int64_t> selected;
  const int64_t all = static_cast<int64_t>(rows.size()), step = std::max<int64_t>(1, at_once(keys) / task.key_blocks);
  for (int64_t i = 0; i < all; i += step) {
    const int64_t n = std::min(step, all - i);
    const at::Tensor index = at::tensor(at::ArrayRef<int64_t>(rows).slice(i, n), at::kLong);
    const at::Tensor queries = queries_here.index_select(0, index), scores = queries.matmul(keys.t()).contiguous();
    for (int64_t x = 0; x < n; ++x) {
      const int64_t place = rows[static_cast<size_t>(i + x)], query_block = first + place;
      row.select(scores.const_data_ptr<double>() + x * task.key_blocks,
                 queries.const_data_ptr<double>() + x * means.dim, means, task.first_own + query_block,
                 task.visible(query_block), task.spec.keep, selected);
      std::copy(selected.begin(), selected.end(), row_of(place));
    }
  }
}

// The selection for `count` query blocks from `first`: int64 [query_means.size(0), B, H, keep] on the CPU, ascending,
// filled up with -1 if there are fewer. query_means is [>= count, B, H, D], key_means [key blocks, B, Hk, D].
at::Tensor select_share(const Task& task, const at::Tensor& query_means, const at::Tensor& key_means, int64_t first,
                        int64_t count) {
  const int64_t batch = task.shape.batch, heads = task.shape.heads, keep = task.spec.keep;
  const at::Tensor chosen = at::full({query_means.size(0), batch, heads, keep}, -1, at::kLong);
  if (count == 0) return chosen;
  chosen.narrow(0, 0, count)
      .copy_(select_by_products(task, query_means, key_means, first, count));  // waits for the device
  int64_t* const data = chosen.mutable_data_ptr<int64_t>();
  const auto row_of = [&](int64_t i, int64_t b, int64_t h) { return data + ((i * batch + b) * heads + h) * keep; };
  at::Tensor queries_here, keys_here;  // copied only if a row is undecided
  std::vector<int64_t> undecided;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      undecided.clear();
      for (int64_t i = 0; i < count; ++i) {
        int64_t* const row = row_of(i, b, h);
        const int64_t end = task.visible(first + i);
        if (end <= keep) {
          std::iota(row, row + end, 0);
          std::fill(row + end, row + keep, -1);
        } else if (row[0] == kUndecided) {
          undecided.push_back(i);
        }
      }
      if (undecided.empty()) continue;
      if (!keys_here.defined()) queries_here = query_means.cpu(), keys_here = key_means.cpu();
      decide_rows(task, queries_here.select(1, b).select(1, h),
                  keys_here.select(1, b).select(1, h / (heads / task.shape.kv_heads)), first, undecided,
                  [&](int64_t i) { return row_of(i, b, h); });
    }
  }
  return chosen;
}

// Makes a map from the selection, int64 [query blocks or more, B, H, keep] on the CPU.
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

// The map of all visible blocks, shared by all batch rows and heads. Nothing needs to be compared for it.
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

  // Every rank selects for `share` query blocks, except that the last ranks may have fewer.
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
    const at::Tensor mine = upload(chosen, q.device());
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
                  request.shape.query_offset / block};  // validate has checked that it is a multiple
  spec.blocks = given_map(std::make_shared<const BlockMap>(select_map(task, request, q, k, comm, label)));
}

}  // namespace

PlanRequest select_blocks(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, Communicator& comm,
                          const std::string& label) {
  if (!is_adaptive(request.pattern)) return request;
  validate(request.pattern, request.shape);
  PlanRequest selected = request;
  // The selection does not move positions: they are where the tensors have them.
  if (!selected.balance_by && is_dealt(selected.layout)) selected.balance_by = request.pattern;
  selected.pattern = with_causal_members(std::move(selected.pattern));
  // The selection is not differentiated; gradients flow through the attention only.
  select_all(selected.pattern, request, q.detach(), k.detach(), comm, label);
  return selected;
}

int64_t selection_bytes(const PlanRequest& request, int rank, int64_t head_dim, bool gpu) {
  int64_t most = 0;
  const auto add = [&](const auto& self, const PatternSpec& spec) -> void {
    for (const PatternSpec& member : spec.members) self(self, member);
    if (spec.kind != PatternSpec::Kind::kBlocks || spec.blocks.map != BlocksSpec::Map::kAdaptive) return;
    const AttentionShape& s = request.shape;
    const int64_t block = spec.blocks.block, number = sizeof(double), at_once = gpu ? kAtOnceOnGpu : kAtOnceOnCpu;
    const int64_t key_blocks = ceil_div(s.k_len, block), query_blocks = ceil_div(s.q_len, block);
    if (spec.blocks.keep >= key_blocks || query_blocks == 0 || s.batch == 0) return;
    const int64_t share = ceil_div(query_blocks, request.ranks), padded = share * request.ranks;
    const int64_t key_means = s.batch * key_blocks * s.kv_heads * head_dim * number;
    const int64_t query_rows = s.batch * s.heads * head_dim * number;  // the bytes of one query block
    // The rows that are being summed, and the sums that are added.
    const int64_t rows = query_layout(request).count(rank);
    const int64_t sums = 2 * std::min(at_once * number, rows * query_rows);
    // For this rank's share of the query blocks: the query means in the order of their kv heads, and scores with their
    // indices.
    const int64_t scores = std::min(share, std::max<int64_t>(1, at_once / (key_blocks * s.batch * s.heads))) *
                           key_blocks * s.batch * s.heads * number;
    const int64_t means = (request.ranks > 1 ? padded + share : padded) * query_rows;
    const int64_t chosen = 2 * padded * s.batch * s.heads * spec.blocks.keep * number;
    most = std::max(most, 2 * key_means + std::max(means + sums, share * query_rows + 3 * scores + chosen));
  };
  add(add, request.pattern);
  return most;
}

}  // namespace annulus
