// The definitions of patterns as predicates over pairs, and dense attention in plain loops; see oracle.h.
#include "attention/oracle/oracle.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace annulus {

namespace {

// The number of the segment or block of length n that contains x, and the index of x in it.
int64_t part_of(int64_t x, int64_t n) { return x >= 0 ? x / n : -((n - 1 - x) / n); }
int64_t place_in(int64_t x, int64_t n) { return x - part_of(x, n) * n; }

// For each index the number of the document that contains it.
std::vector<int64_t> numbers_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> numbers;
  for (size_t d = 0; d < lengths.size(); ++d) {
    numbers.insert(numbers.end(), static_cast<size_t>(lengths[d]), static_cast<int64_t>(d));
  }
  return numbers;
}

Count same_document(const PatternSpec& spec) {
  std::vector<std::vector<int64_t>> of_queries, of_keys;
  for (const auto& row : spec.documents) of_queries.push_back(numbers_of(row));
  for (const auto& row : spec.key_documents.empty() ? spec.documents : spec.key_documents) {
    of_keys.push_back(numbers_of(row));
  }
  return [of_queries, of_keys](int64_t batch, int64_t, int64_t query, int64_t key) -> int64_t {
    const auto row = static_cast<size_t>(batch);
    return of_queries[of_queries.size() == 1 ? 0 : row][static_cast<size_t>(query)] ==
           of_keys[of_keys.size() == 1 ? 0 : row][static_cast<size_t>(key)];
  };
}

Count dilated(const DilatedSpec& d, const AttentionShape& shape) {
  return [d, shape](int64_t, int64_t head, int64_t query, int64_t key) -> int64_t {
    const int64_t branches = static_cast<int64_t>(d.segment_lengths.size()), position = query + shape.query_offset;
    int64_t count = 0, group_end = 0;
    for (int64_t i = 0; i < branches; ++i) {
      const int64_t w = d.segment_lengths[static_cast<size_t>(i)], r = d.dilation_rates[static_cast<size_t>(i)];
      const int64_t group_begin = group_end;
      group_end += shape.heads / branches + (i < shape.heads % branches);
      if (d.combine == DilatedSpec::Combine::kMean && (head < group_begin || head >= group_end)) continue;
      const int64_t offset = d.offsets == DilatedSpec::Offsets::kModulo ? head % r : head / ((shape.heads + r - 1) / r);
      count += part_of(key, w) == part_of(position, w) && place_in(position, w) % r == offset &&
               place_in(key, w) % r == offset;
    }
    return count;
  };
}

Count blocks(const PatternSpec& spec, const AttentionShape& shape) {
  using Map = BlocksSpec::Map;
  const BlocksSpec& b = spec.blocks;
  if (b.given || b.map == Map::kBigBird || b.map == Map::kAdaptive || b.map == Map::kFile) {
    const BlockMap map = make_block_map(spec, shape);
    return [map, active = map.dense()](int64_t batch, int64_t head, int64_t query, int64_t key) -> int64_t {
      const int64_t row = (map.batch == 1 ? 0 : batch) * map.heads + (map.heads == 1 ? 0 : head);
      const int64_t block = (row * map.query_blocks + query / map.block) * map.key_blocks + key / map.block;
      return active[static_cast<size_t>(block)] != 0;
    };
  }
  return [b, shape](int64_t, int64_t, int64_t query, int64_t key) -> int64_t {
    const int64_t bi = part_of(query + shape.query_offset, b.block), bj = key / b.block;
    const int64_t distance = bi > bj ? bi - bj : bj - bi;
    const bool near = distance <= b.window_blocks;
    switch (b.map) {
      case Map::kLocal:
        return near;
      case Map::kDilated:
        return near && distance % b.rate == 0;
      case Map::kGlobalLocal:
        return near || bj < b.global_blocks || (bi >= 0 && bi < b.global_blocks);
      case Map::kStrided:
        return near || bj % b.stride == b.stride - 1;
      case Map::kHierarchical:
        for (const BlocksSpec::Level& level : b.levels) {
          if (distance <= level.reach && bj % level.stride == level.stride - 1) return 1;
        }
        return 0;
      default:
        return 0;  // the other maps are handled above
    }
  };
}

Count unrestricted(const PatternSpec& spec, const AttentionShape& shape) {
  switch (spec.kind) {
    case PatternSpec::Kind::kFull:
      break;
    case PatternSpec::Kind::kWindow:
      return [spec, shape](int64_t, int64_t, int64_t query, int64_t key) -> int64_t {
        const int64_t position = query + shape.query_offset;
        return key >= position - spec.left && key <= position + spec.right;
      };
    case PatternSpec::Kind::kDilated:
      return dilated(spec.dilated, shape);
    case PatternSpec::Kind::kBlocks:
      return blocks(spec, shape);
    case PatternSpec::Kind::kUnion: {
      std::vector<Count> members;
      for (const PatternSpec& member : spec.members) members.push_back(count_of(member, shape));
      return [members](int64_t batch, int64_t head, int64_t query, int64_t key) {
        int64_t sum = 0;
        for (const Count& count : members) sum += count(batch, head, query, key);
        return sum;
      };
    }
    case PatternSpec::Kind::kSlices:
      return [slices = spec.slices](int64_t batch, int64_t head, int64_t query, int64_t key) {
        int64_t sum = 0;
        for (const Slice& s : slices) {
          sum += s.batch.contains(batch) && s.heads.contains(head) && s.queries.contains(query) &&
                 s.keys.contains(key) && s.band.lo <= key - query && key - query <= s.band.hi;
        }
        return sum;
      };
  }
  return [](int64_t, int64_t, int64_t, int64_t) -> int64_t { return 1; };
}

}  // namespace

Count count_of(const PatternSpec& pattern, const AttentionShape& shape) {
  validate(pattern, shape);
  const PatternSpec spec = with_causal_members(pattern);  // what a map draws depends on it
  const Count count = unrestricted(spec, shape);
  const Count together = spec.documents.empty() ? Count() : same_document(spec);
  return [count, together, causal = spec.causal, offset = shape.query_offset](int64_t batch, int64_t head,
                                                                              int64_t query, int64_t key) -> int64_t {
    if (causal && key > query + offset) return 0;
    if (together && !together(batch, head, query, key)) return 0;
    return count(batch, head, query, key);
  };
}

OracleResult oracle(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& dout_in,
                    double scale, const Count& count, const PairWeight& weight) {
  const at::Tensor q = q_in.to(at::kDouble).contiguous(), k = k_in.to(at::kDouble).contiguous();
  const at::Tensor v = v_in.to(at::kDouble).contiguous(), dout = dout_in.to(at::kDouble).contiguous();
  const int64_t B = q.size(0), Sq = q.size(1), H = q.size(2), D = q.size(3), Sk = k.size(1), Hk = k.size(2);
  OracleResult r{at::zeros(q.sizes(), q.options()), at::zeros({B, H, Sq}, q.options()),
                 at::zeros(q.sizes(), q.options()), at::zeros(k.sizes(), q.options()),
                 at::zeros(k.sizes(), q.options())};
  const auto row = [D](const at::Tensor& t, int64_t b, int64_t s, int64_t h) {
    return t.data_ptr<double>() + ((b * t.size(1) + s) * t.size(2) + h) * D;
  };
  const auto dot = [D](const double* x, const double* y) {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += x[d] * y[d];
    return sum;
  };
  struct Term {
    int64_t key;
    double score, weight;
  };
  std::vector<Term> terms;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t hk = h / (H / Hk);
      for (int64_t i = 0; i < Sq; ++i) {
        terms.clear();
        double top = -std::numeric_limits<double>::infinity();
        for (int64_t j = 0; j < Sk; ++j) {
          const int64_t m = count(b, h, i, j);
          if (m == 0) continue;
          const double score = scale * dot(row(q, b, i, h), row(k, b, j, hk)) + std::log(static_cast<double>(m));
          terms.push_back({j, score, weight ? weight(b, h, i, j) : 1});
          top = std::max(top, score);
        }
        double& lse = r.lse.data_ptr<double>()[(b * H + h) * Sq + i];
        lse = -std::numeric_limits<double>::infinity();
        if (terms.empty()) continue;
        double sum = 0;
        for (const Term& t : terms) sum += std::exp(t.score - top);
        lse = top + std::log(sum);
        double* out = row(r.out, b, i, h);
        for (const auto& [j, score, w] : terms) {
          const double p = std::exp(score - lse) * w;
          const double* const value = row(v, b, j, hk);
          for (int64_t d = 0; d < D; ++d) out[d] += p * value[d];
        }
        const double* g = row(dout, b, i, h);
        const double delta = dot(g, out);
        for (const auto& [j, score, w] : terms) {
          const double p = std::exp(score - lse), ds = p * (w * dot(g, row(v, b, j, hk)) - delta) * scale;
          const double *const query = row(q, b, i, h), *const key = row(k, b, j, hk);
          double *const dq = row(r.dq, b, i, h), *const dk = row(r.dk, b, j, hk), *const dv = row(r.dv, b, j, hk);
          for (int64_t d = 0; d < D; ++d) {
            dq[d] += ds * key[d];
            dk[d] += ds * query[d];
            dv[d] += p * w * g[d];
          }
        }
      }
    }
  }
  return r;
}

}  // namespace annulus
